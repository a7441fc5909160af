#define BPC_ISA zen4
#define BPC_WORDS
#include "isa.h"
