#define BPC_ISA avx2
#include "isa.h"
