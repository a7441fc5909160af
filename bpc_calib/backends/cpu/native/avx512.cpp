#define BPC_ISA avx512
#include "isa.h"
