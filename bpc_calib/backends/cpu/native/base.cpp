#define BPC_ISA base
#include "isa.h"
