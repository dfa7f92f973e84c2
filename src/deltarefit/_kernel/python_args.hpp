// Python objects to views, records and slices, and back. The only header that knows Python besides kernel.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "boxes.hpp"
#include "record.hpp"
#include "types.hpp"
#include "view.hpp"

namespace deltarefit {

namespace nb = nanobind;

// Throws what Python shall see: ValueError or MemoryError.
void raise_unless_ok(const Status& status);

// A buffer of an element array, released at the end of the scope (with the GIL held).
class ArrayArg {
 public:
  enum Access { kRead, kWrite };
  ArrayArg(nb::handle object, const char* name, Access access);
  ArrayArg(const ArrayArg&) = delete;
  ArrayArg& operator=(const ArrayArg&) = delete;
  ~ArrayArg();

  View view;  // as given: collapse before use

 private:
  Py_buffer buffer_;
};

// The slices of one delta.
class SliceArgs {
 public:
  explicit SliceArgs(nb::handle sequence);
  SliceArgs(const SliceArgs&) = delete;
  SliceArgs& operator=(const SliceArgs&) = delete;
  ~SliceArgs();

  Slice items[kMaxPieces];
  u64 count = 0;

 private:
  void release();
  Py_buffer buffers_[kMaxPieces];
};

Record record_from(nb::handle tuple);
Rows rows_from(nb::handle tuple);
nb::tuple record_to_tuple(const Record& record);
nb::tuple lanes_to_tuple(Lanes lanes);
std::string stream_name(const Piece& piece);

// Runs `work` without the GIL and raises what it returns.
template <class Work>
void without_gil(Work work) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = work();
  }
  raise_unless_ok(status);
}

// A record and its slices; sizes are checked here, bytes by validate.
struct DeltaArg {
  Record record;
  SliceArgs slices;
  Pieces pieces;

  DeltaArg(nb::handle record_tuple, nb::handle sequence) : record(record_from(record_tuple)), slices(sequence) {
    raise_unless_ok(attach_slices(record, slices.items, slices.count, pieces));
  }
  u32 width() const { return Code::unpack(record.code).width(); }
};

// A table of boxes (NumPy int64, C-contiguous) for a storage of this many elements.
void boxes_from(nb::handle table, u64 storage_size, Boxes& out);

// A new NumPy array of `n` unsigned integers of `width` bytes, and its memory.
nb::object new_array(u64 n, u32 width, u8** data);

}  // namespace deltarefit
