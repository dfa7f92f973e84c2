#include "python_args.hpp"

#include <cstring>
#include <new>

namespace deltarefit {
namespace {

// The element width of a buffer format of native unsigned integers, or 0.
u32 unsigned_width(const char* format, Py_ssize_t item_size) {
  if (format == nullptr) return item_size == 1 ? 1 : 0;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (std::strlen(format) != 1 || std::strchr("BHILQ", *format) == nullptr) return 0;
  return item_size == 1 || item_size == 2 || item_size == 4 || item_size == 8 ? u32(item_size) : 0;
}

bool is_int64(const Py_buffer& buffer) {
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  return (std::strcmp(format, "l") == 0 || std::strcmp(format, "q") == 0) && buffer.itemsize == sizeof(i64);
}

[[noreturn]] void raise_value(const std::string& text) { throw nb::value_error(text.c_str()); }

// Fills in the fields from a tuple of just as many integers; `what` says what it is otherwise.
template <std::size_t n>
void integers_from(nb::handle tuple, u64* const (&fields)[n], const char* what) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_Size(tuple.ptr()) != Py_ssize_t(n)) raise_value(what);
  for (std::size_t i = 0; i < n; ++i) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple.ptr(), Py_ssize_t(i)));
    if (value == ~0ull && PyErr_Occurred()) {
      PyErr_Clear();
      raise_value(what);
    }
    *fields[i] = value;
  }
}

}  // namespace

void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  if (status.kind == Status::kMemory) throw std::bad_alloc();
  std::string text = status.what;
  if (status.numbers)
    text += ": expected " + std::to_string(status.expected) + ", found " + std::to_string(status.found);
  raise_value(text);
}

ArrayArg::ArrayArg(nb::handle object, const char* name, Access access) {
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw nb::python_error();
  const char* fault = nullptr;
  view.width = unsigned_width(buffer_.format, buffer_.itemsize);
  if (view.width == 0) fault = " is not an array of native unsigned integers";
  else if (access == kWrite && buffer_.readonly) fault = " is read-only";
  else if (buffer_.ndim > int(kMaxDims)) fault = " has too many dimensions";
  if (fault != nullptr) {
    PyBuffer_Release(&buffer_);
    raise_value(std::string(name) + fault);
  }
  view.data = static_cast<u8*>(buffer_.buf);
  view.dims = u32(buffer_.ndim);
  for (u32 d = 0; d < view.dims; ++d) {
    view.size[d] = u64(buffer_.shape[d]);
    view.stride[d] = i64(buffer_.strides[d]);
  }
}

ArrayArg::~ArrayArg() { PyBuffer_Release(&buffer_); }

SliceArgs::SliceArgs(nb::handle sequence) {
  nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "slices is not a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const Py_ssize_t n = PySequence_Size(fast.ptr());
  if (n > Py_ssize_t(kMaxPieces)) raise_value("more slices than any delta has");
  for (Py_ssize_t i = 0; i < n; ++i) {
    nb::object item = nb::steal(PySequence_GetItem(fast.ptr(), i));
    if (!item.is_valid() || PyObject_GetBuffer(item.ptr(), &buffers_[i], PyBUF_SIMPLE) != 0) {
      release();
      throw nb::python_error();
    }
    items[count++] = Slice{static_cast<const u8*>(buffers_[i].buf), u64(buffers_[i].len)};
  }
}

SliceArgs::~SliceArgs() { release(); }

void SliceArgs::release() {
  for (u64 i = 0; i < count; ++i) PyBuffer_Release(&buffers_[i]);
  count = 0;
}

void boxes_from(nb::handle table, u64 storage_size, Boxes& out) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(table.ptr(), &buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw nb::python_error();
  const Py_ssize_t item = sizeof(i64);
  Status status;
  if (!is_int64(buffer)) status = wrong("boxes is not an array of native int64");
  else if (buffer.ndim != 2) status = wrong("boxes has another number of dimensions", 2, u64(buffer.ndim));
  else if (buffer.len != 0 && ((buffer.shape[1] > 1 && buffer.strides[1] != item) ||
                               (buffer.shape[0] > 1 && buffer.strides[0] != buffer.shape[1] * item)))
    status = wrong("boxes is not contiguous");
  else
    status = read_boxes(static_cast<const u8*>(buffer.buf), u64(buffer.shape[0]), u64(buffer.shape[1]), storage_size,
                        out);
  PyBuffer_Release(&buffer);
  raise_unless_ok(status);
}

Record record_from(nb::handle tuple) {
  Record r;
  u64* const fields[] = {&r.start,     &r.length,      &r.count,   &r.code,        &r.runs,     &r.gap_chain, &r.run_chain,
                         &r.value_chain, &r.escapes, &r.rows.offset, &r.rows.run, &r.rows.step, &r.rows.pitch};
  integers_from(tuple, fields, "a record is a tuple of 13 integers within 0 and 2**64-1");
  return r;
}

Rows rows_from(nb::handle tuple) {
  Rows r;
  u64* const fields[] = {&r.offset, &r.run, &r.step, &r.pitch};
  integers_from(tuple, fields, "rows is a tuple of 4 integers within 0 and 2**64-1");
  return r;
}

nb::tuple record_to_tuple(const Record& r) {
  return nb::make_tuple(r.start, r.length, r.count, r.code, r.runs, r.gap_chain, r.run_chain, r.value_chain,
                        r.escapes, r.rows.offset, r.rows.run, r.rows.step, r.rows.pitch);
}

nb::tuple lanes_to_tuple(Lanes lanes) { return nb::make_tuple(lanes.lane0, lanes.lane1); }

std::string stream_name(const Piece& piece) {
  static const char* const kNames[] = {"gap", "run", "xor", "add", "set", "esc", "two"};
  if (piece.role == kTwo) return kNames[kTwo];
  return kNames[piece.role] + std::to_string(piece.planes) + "." + std::to_string(piece.plane);
}

nb::object new_array(u64 n, u32 width, u8** data) {
  static const char* const kTypes[] = {"uint8", "uint16", "uint32", "uint64"};
  nb::module_ numpy = nb::module_::import_("numpy");
  nb::object array = numpy.attr("empty")(n, numpy.attr(kTypes[log_of_width(width)]));
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_WRITABLE) != 0) throw nb::python_error();
  *data = static_cast<u8*>(buffer.buf);
  PyBuffer_Release(&buffer);  // the array itself keeps its memory
  return array;
}

}  // namespace deltarefit
