// The core, compiled once per instruction level: a .cpp defines DR_LEVEL (a namespace) and includes this file.
#include "level.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "access.hpp"
#include "rows.hpp"
#include "lanes.hpp"
#include "digest.hpp"
#include "scan.hpp"
#include "pack.hpp"
#include "choose.hpp"
#include "encode.hpp"
#include "unpack.hpp"
#include "apply.hpp"
#include "place_find.hpp"
#include "place.hpp"
#include "place_apply.hpp"
#include "place_digest.hpp"

namespace deltarefit::DR_LEVEL {
namespace {

// Calls f.operator()<W>() for the element type of `width` bytes.
template <class F>
inline auto by_width(u32 width, F f) {
  switch (width) {
    case 1: return f(u8());
    case 2: return f(u16());
    case 4: return f(u32());
    default: return f(u64());
  }
}

bool long_gaps(u64 numel) { return numel > 0xFFFFFFFFull; }

u64 count_changed(const View& older, const View& newer) {
  return by_width(older.width, [&](auto w) { return count_changed_as<decltype(w)>(older, newer); });
}

template <class W, class G>
Status extract_as(const View& older, const View& newer, Scratch& scratch, u64& count) {
  Changes<W, G> changes;
  DR_TRY((scan<W, G>(older, newer, Place(), nullptr, scratch, changes)));
  count = changes.count;
  return {};
}

Status extract(const View& older, const View& newer, Scratch& scratch, u64& count) {
  return by_width(older.width, [&](auto w) {
    using W = decltype(w);
    return long_gaps(older.numel) ? extract_as<W, u64>(older, newer, scratch, count)
                                  : extract_as<W, u32>(older, newer, scratch, count);
  });
}

template <class G>
void positions_of_gaps(const G* gaps, u64 n, u64* out) {
  u64 next = 0;
  for (u64 i = 0; i < n; ++i) {
    out[i] = next + gaps[i];
    next = out[i] + 1;
  }
}

void copy_positions(const Scratch& scratch, u64 numel, u64 count, u64* out) {
  if (long_gaps(numel)) positions_of_gaps(scratch.gaps.as<u64>(), count, out);
  else positions_of_gaps(scratch.gaps.as<u32>(), count, out);
}

Status encode(const View& older, const View& newer, const Place& place, const Forced& forced, Scratch& scratch,
              Encoded& out) {
  return by_width(older.width, [&](auto w) {
    using W = decltype(w);
    return long_gaps(older.numel) ? encode_as<W, u64>(older, newer, place, forced, scratch, out)
                                  : encode_as<W, u32>(older, newer, place, forced, scratch, out);
  });
}

u32 width_of(const Record& record) { return Code::unpack(record.code).width(); }

Status validate(const Record& record, const Pieces& pieces) {
  return by_width(width_of(record), [&](auto w) {
    using W = decltype(w);
    return for_each_block<W>(record, pieces, [](const Block<W>&) {});
  });
}

Status decode(const Record& record, const Pieces& pieces, u64* positions, u8* values) {
  return by_width(width_of(record), [&](auto w) {
    using W = decltype(w);
    return for_each_placed<W>(record, pieces, [&](const Block<W>& block) {
      for (u32 i = 0; i < block.n; ++i) positions[block.index + i] = block.base + block.offsets[i];
      __builtin_memcpy(values + block.index * sizeof(W), block.values, block.n * sizeof(W));
    });
  });
}

Status apply(const Job& job) {
  return by_width(job.array->width, [&](auto w) { return apply_as<decltype(w)>(job); });
}

Status apply_values(const Job& job, const View& values) {
  return by_width(job.array->width, [&](auto w) { return apply_values_as<decltype(w)>(job, values); });
}

Status gather(const Job& job, u8* values) {
  return by_width(job.array->width, [&](auto w) { return gather_as<decltype(w)>(job, values); });
}

Status sums(const Job& job, u64 key, Lanes& out) {
  return by_width(job.array->width, [&](auto w) { return sums_as<decltype(w)>(job, key, out); });
}

Status preview(const Job& job, u64 key, Lanes& before, Lanes& after, u8* values) {
  return by_width(job.array->width,
                  [&](auto w) { return preview_as<decltype(w)>(job, key, before, after, values); });
}

Lanes digest(const View& array, const Place& place) {
  return by_width(array.width, [&](auto w) { return digest_as<decltype(w)>(array, place); });
}

// Calls f with the element types of the canonical tensor and of the storage.
template <class F>
inline Status by_placed(const PlacedJob& job, F f) {
  if (job.widened) return f(u16(), u32());
  return by_width(job.width, [&](auto w) { return f(w, w); });
}

Status place_validate(const PlacedJob& job) {
  return by_placed(job, [&](auto w, auto s) { return place_validate_as<decltype(w), decltype(s)>(job); });
}

Status place_apply(const PlacedJob& job, u64& hits) {
  return by_placed(job, [&](auto w, auto s) { return place_apply_as<decltype(w), decltype(s)>(job, hits); });
}

Status place_sums(const PlacedJob& job, u64 key, Lanes& out) {
  return by_placed(job, [&](auto w, auto s) { return place_sums_as<decltype(w), decltype(s)>(job, key, out); });
}

Status place_preview(const PlacedJob& job, u64 key, Lanes& before, Lanes& after) {
  return by_placed(
      job, [&](auto w, auto s) { return place_preview_as<decltype(w), decltype(s)>(job, key, before, after); });
}

Status place_digest(const PlacedJob& job, u64 key, Lanes& out) {
  return by_placed(job, [&](auto w, auto s) { return place_digest_as<decltype(w), decltype(s)>(job, key, out); });
}

Status place_decode(const PlacedJob& job, u64& hits, u64* positions, u64* offsets, u8* values) {
  return by_width(job.width,
                  [&](auto w) { return place_decode_as<decltype(w)>(job, hits, positions, offsets, values); });
}

#define DR_STRING(name) DR_STRING_OF(name)
#define DR_STRING_OF(name) #name

const Level kLevel = {DR_STRING(DR_LEVEL), count_changed, extract,    copy_positions, encode,       validate,
                      decode,              apply,         apply_values, gather,       sums,         preview,
                      digest,              place_validate, place_apply, place_sums,   place_preview, place_digest,
                      place_decode};

}  // namespace

const Level& level() { return kLevel; }

}  // namespace deltarefit::DR_LEVEL
