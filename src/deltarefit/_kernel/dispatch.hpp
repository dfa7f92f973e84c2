// Which instruction levels this CPU runs, and which one is in use.
#pragma once

#include "level.hpp"

namespace deltarefit {

constexpr u32 kMaxLevels = 3;

// Worst first; returns how many.
u32 runnable_levels(const Level** out);

const Level& current_level();

// False when there is no such level here.
bool use_level(const char* name);

}  // namespace deltarefit
