// What one instruction level offers: the whole core as a table of functions, compiled once per level.
#pragma once

#include "boxes.hpp"
#include "memory.hpp"
#include "types.hpp"
#include "view.hpp"

namespace deltarefit {

// Choices of encode that are forced when not negative.
struct Forced {
  int kind = -1, gap_planes = -1, operation = -1, packing = -1;
};

// Pieces point into the scratch that was passed in. `nothing` says that no element changed.
struct Encoded {
  bool nothing = true;
  Record record;
  Pieces pieces;
  Lanes before, after;
};

// One delta and the array it applies to. Views are collapsed; `first` is the index of the delta's first position.
struct Job {
  const Record* record;
  const Pieces* pieces;
  const View* array;
  u64 first;
};

// A storage that holds what the boxes say, and the delta of a tensor whose positions they carry there, if there is
// one. `widened`: elements of two bytes lie in the upper halves of four, whose lower halves are zero.
struct PlacedJob {
  const Record* record;
  const Pieces* pieces;
  const Boxes* boxes;
  u8* data;
  u32 width;  // of the canonical elements
  bool widened;
};

struct Level {
  const char* name;

  // Pairs are collapsed together and of one shape.
  u64 (*count_changed)(const View& older, const View& newer);
  // Changed positions as gaps (u32 up to 2^32 elements, else u64), old and new values, in scratch.
  Status (*extract)(const View& older, const View& newer, Scratch& scratch, u64& count);
  void (*copy_positions)(const Scratch& scratch, u64 numel, u64 count, u64* out);
  Status (*encode)(const View& older, const View& newer, const Place& place, const Forced& forced, Scratch& scratch,
                   Encoded& out);

  // Every check of §4.6 on one delta. The functions below make the same checks on the way, so a caller that wants
  // nothing written unless all is well runs validate first; the record itself must have passed check_record.
  Status (*validate)(const Record& record, const Pieces& pieces);
  // Positions in the tensor, counted from the delta's first one.
  Status (*decode)(const Record& record, const Pieces& pieces, u64* positions, u8* values);
  Status (*apply)(const Job& job);
  Status (*apply_values)(const Job& job, const View& values);
  Status (*gather)(const Job& job, u8* values);
  Status (*sums)(const Job& job, u64 key, Lanes& out);
  Status (*preview)(const Job& job, u64 key, Lanes& before, Lanes& after, u8* values);
  Lanes (*digest)(const View& array, const Place& place);

  // Listed positions that no box holds are skipped. place_validate is validate, and what place_apply would read.
  Status (*place_validate)(const PlacedJob& job);
  Status (*place_apply)(const PlacedJob& job, u64& hits);
  Status (*place_sums)(const PlacedJob& job, u64 key, Lanes& out);
  Status (*place_preview)(const PlacedJob& job, u64 key, Lanes& before, Lanes& after);
  Status (*place_digest)(const PlacedJob& job, u64 key, Lanes& out);
  // By ascending position; only counts where `positions` is null, else `hits` says for how many there is room.
  Status (*place_decode)(const PlacedJob& job, u64& hits, u64* positions, u64* offsets, u8* values);
};

namespace portable {
const Level& level();
}
#if defined(__x86_64__)
namespace avx2 {
const Level& level();
}
namespace avx512 {
const Level& level();
}
#elif defined(__aarch64__)
namespace neon {
const Level& level();
}
#endif

}  // namespace deltarefit
