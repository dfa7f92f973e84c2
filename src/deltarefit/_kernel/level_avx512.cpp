#define DR_LEVEL avx512
#include "level.inl"
