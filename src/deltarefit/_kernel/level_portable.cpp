#define DR_LEVEL portable
#include "level.inl"
