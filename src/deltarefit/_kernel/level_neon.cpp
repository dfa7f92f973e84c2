#define DR_LEVEL neon
#include "level.inl"
