#include "dispatch.hpp"

#include <atomic>
#include <cstring>

namespace deltarefit {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("popcnt");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}
#endif

const Level* best_level() {
  const Level* levels[kMaxLevels];
  return levels[runnable_levels(levels) - 1];
}

std::atomic<const Level*>& chosen() {
  static std::atomic<const Level*> level{best_level()};
  return level;
}

}  // namespace

u32 runnable_levels(const Level** out) {
  u32 n = 0;
  out[n++] = &portable::level();
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (runs_avx2()) out[n++] = &avx2::level();
  if (runs_avx512()) out[n++] = &avx512::level();
#elif defined(__aarch64__)
  out[n++] = &neon::level();
#endif
  return n;
}

const Level& current_level() { return *chosen().load(std::memory_order_relaxed); }

bool use_level(const char* name) {
  const Level* levels[kMaxLevels];
  const u32 n = runnable_levels(levels);
  for (u32 i = 0; i < n; ++i) {
    if (std::strcmp(levels[i]->name, name) != 0) continue;
    chosen().store(levels[i], std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace deltarefit
