#include "view.hpp"

namespace deltarefit {
namespace {

Status count_elements(View& view) {
  u64 numel = 1;
  bool empty = false;
  for (u32 d = 0; d < view.dims; ++d) empty |= view.size[d] == 0;
  for (u32 d = 0; d < view.dims && !empty; ++d)
    if (__builtin_mul_overflow(numel, view.size[d], &numel)) return wrong("array has too many elements");
  view.numel = empty ? 0 : numel;
  if (numel > kMaxElements) return wrong("array has too many elements", kMaxElements, numel);
  return {};
}

bool steps_on(const View& view, u32 outer, u32 inner) {
  i64 span;
  return !__builtin_mul_overflow(view.stride[inner], i64(view.size[inner]), &span) && span == view.stride[outer];
}

// Same algorithm for one view (b == nullptr) and for two of one shape.
void merge(View& a, View* b) {
  u32 kept = 0;
  for (u32 d = 0; d < a.dims; ++d) {
    if (a.size[d] == 1) continue;
    a.size[kept] = a.size[d];
    a.stride[kept] = a.stride[d];
    if (b) b->size[kept] = b->size[d], b->stride[kept] = b->stride[d];
    if (kept > 0 && steps_on(a, kept - 1, kept) && (!b || steps_on(*b, kept - 1, kept))) {
      a.size[kept - 1] *= a.size[kept];
      a.stride[kept - 1] = a.stride[kept];
      if (b) b->size[kept - 1] *= b->size[kept], b->stride[kept - 1] = b->stride[kept];
    } else {
      ++kept;
    }
  }
  a.dims = kept;
  if (b) b->dims = kept;
}

}  // namespace

Status collapse(View& view) {
  DR_TRY(count_elements(view));
  if (view.numel == 0) {
    view.dims = 0;
    return {};
  }
  merge(view, nullptr);
  return {};
}

Status collapse_pair(View& a, View& b) {
  if (a.width != b.width) return wrong("arrays of different element widths", a.width, b.width);
  if (a.dims != b.dims) return wrong("arrays of different shapes", a.dims, b.dims);
  for (u32 d = 0; d < a.dims; ++d)
    if (a.size[d] != b.size[d]) return wrong("arrays of different shapes", a.size[d], b.size[d]);
  DR_TRY(count_elements(a));
  b.numel = a.numel;
  if (a.numel == 0) {
    a.dims = b.dims = 0;
    return {};
  }
  merge(a, &b);
  return {};
}

}  // namespace deltarefit
