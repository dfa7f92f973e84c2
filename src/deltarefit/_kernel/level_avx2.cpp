#define DR_LEVEL avx2
#include "level.inl"
