#include "record.hpp"

namespace deltarefit {
namespace {

bool is_plane_count(u32 planes) { return planes >= 1 && planes <= 8; }

Status check_sizes(const Record& r) {
  if (r.length < 1) return wrong("delta covers no element");
  if (r.length > kMaxElements || r.start > kMaxElements - r.length)
    return wrong("delta reaches beyond the largest tensor", kMaxElements, r.start);
  if (r.count < 1 || r.count > r.length) return wrong("count is not within 1 and the length", r.length, r.count);
  if (r.code >> kCodeBits) return wrong("reserved bits of the code are set", 0, r.code);
  return {};
}

// An integer array of `n` entries: its planes and its chain, which has at least a byte per entry.
Status check_array(const char* planes_text, const char* chain_text, u64 n, u32 planes, u64 chain) {
  if (n == 0) {
    if (planes != 0) return wrong(planes_text, 0, planes);
    if (chain != 0) return wrong(chain_text, 0, chain);
    return {};
  }
  if (!is_plane_count(planes)) return wrong(planes_text, 8, planes);
  if (chain < n || chain > kMaxPieceBytes) return wrong(chain_text, n, chain);
  return {};
}

Status check_positions(const Record& r, const Code& c) {
  if (c.kind > kAll) return wrong("reserved position kind", kAll, c.kind);
  if (c.kind == kAll && r.count != r.length) return wrong("kind all must list every position", r.length, r.count);
  if (c.kind == kRuns) {
    if (r.runs < 1 || r.runs > r.count) return wrong("number of runs is not within 1 and the count", r.count, r.runs);
  } else if (r.runs != 0) {
    return wrong("runs of a delta of another kind", 0, r.runs);
  }
  const u64 gaps = c.kind == kGaps ? r.count : c.kind == kRuns ? r.runs : 0;
  DR_TRY(check_array("bad number of gap planes", "bad length of the gap chain", gaps, c.gap_planes, r.gap_chain));
  return check_array("bad number of run planes", "bad length of the run chain", r.runs, c.run_planes, r.run_chain);
}

Status check_values(const Record& r, const Code& c) {
  if (c.operation > kSet) return wrong("reserved operation", kSet, c.operation);
  if (c.packing == kTwoBit && c.operation != kAdd) return wrong("two-bit packing of an operation other than ADD");
  if (c.packing == kPlanes && r.escapes != 0) return wrong("escapes without two-bit packing", 0, r.escapes);
  if (r.escapes > r.count) return wrong("more escapes than values", r.count, r.escapes);
  const u64 n = c.packing == kTwoBit ? r.escapes : r.count;
  return check_array("bad number of value planes", "bad length of the value chain", n, c.value_planes, r.value_chain);
}

void add(Pieces& out, Role role, u32 planes, u32 plane, u64 size) {
  out.items[out.count++] = Piece{role, planes, plane, size, nullptr};
}

void add_array(Pieces& out, Role role, u32 planes, u64 n, u64 chain) {
  for (u32 plane = 0; plane + 1 < planes; ++plane) add(out, role, planes, plane, n);
  if (planes != 0) add(out, role, planes, planes - 1, chain);
}

}  // namespace

// Numbers are below 2^48, so that sums of a few of them fit 64 bits; products are watched.
Status check_rows(const Rows& rows, u64 last) {
  if (rows.flat()) {
    if ((rows.offset | rows.step | rows.pitch) != 0) return wrong("rows without elements");
    return {};
  }
  if ((rows.offset | rows.run | rows.step | rows.pitch) >= kMaxElements) return wrong("rows beyond the largest tensor");
  u64 reach, down;  // from the first to the last element of a row; to the last row
  if (rows.step == 0) return wrong("rows without a step");
  if (__builtin_mul_overflow(rows.run - 1, rows.step, &reach) || reach >= rows.pitch)
    return wrong("rows overlap", reach, rows.pitch);
  if (rows.run == 1 ? rows.step != 1 || rows.pitch == 1 : reach + rows.step == rows.pitch)
    return wrong("rows that have a simpler form");
  if (__builtin_mul_overflow(last / rows.run, rows.pitch, &down) || down >= kMaxElements ||
      rows.offset + down + last % rows.run * rows.step >= kMaxElements)
    return wrong("rows reach beyond the largest tensor");
  return {};
}

Status check_record(const Record& record) {
  DR_TRY(check_sizes(record));
  DR_TRY(check_rows(record.rows, record.start + record.length - 1));
  const Code code = Code::unpack(record.code);
  DR_TRY(check_positions(record, code));
  return check_values(record, code);
}

Status list_pieces(const Record& record, Pieces& out) {
  DR_TRY(check_record(record));
  const Code code = Code::unpack(record.code);
  out.count = 0;
  add_array(out, kGap, code.gap_planes, code.kind == kGaps ? record.count : record.runs, record.gap_chain);
  add_array(out, kRun, code.run_planes, record.runs, record.run_chain);
  if (code.packing == kTwoBit) {
    add(out, kTwo, 0, 0, (record.count + 3) / 4);
    add_array(out, kEscape, code.value_planes, record.escapes, record.value_chain);
  } else {
    add_array(out, value_role(code.operation), code.value_planes, record.count, record.value_chain);
  }
  return {};
}

Status attach_slices(const Record& record, const Slice* slices, u64 slice_count, Pieces& out) {
  DR_TRY(list_pieces(record, out));
  if (slice_count != out.count) return wrong("wrong number of slices", out.count, slice_count);
  for (u32 i = 0; i < out.count; ++i) {
    if (slices[i].size != out.items[i].size) return wrong("slice of another size", out.items[i].size, slices[i].size);
    out.items[i].data = slices[i].data;
  }
  return {};
}

}  // namespace deltarefit
