// Checks of a record by itself (docs/format.md §4.1) and the list of its pieces.
#pragma once

#include "types.hpp"

namespace deltarefit {

// That elements 0 to `last` of a piece ascend within the largest tensor, and that no simpler form says the same.
Status check_rows(const Rows& rows, u64 last);

// Every rule of §4.1 that needs nothing but the record.
Status check_record(const Record& record);

// check_record, then role, plane and size of every piece in slice order; data is left null.
Status list_pieces(const Record& record, Pieces& out);

// list_pieces, then the caller's slices must have just these sizes; fills in data.
struct Slice {
  const u8* data;
  u64 size;
};
Status attach_slices(const Record& record, const Slice* slices, u64 slice_count, Pieces& out);

}  // namespace deltarefit
