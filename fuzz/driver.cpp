// A small stand-in for libFuzzer where only GCC is at hand: mutates what reached new code, until the time is up.
//
//   driver SECONDS CRASH_FILE SEED...        exit 0 unless the target or a sanitizer stops the process
//
// The target's objects are compiled with -fsanitize-coverage=trace-pc; an input that reaches a new place is kept.

#include <sanitizer/common_interface_defs.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using Bytes = std::vector<std::uint8_t>;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kPlaces = 1 << 16;
constexpr std::size_t kMostBytes = 4096;
std::uint8_t seen[kPlaces];
std::size_t seen_count = 0;
Bytes current;
const char* crash_file = "crash.bin";

void write_current() {
  if (std::FILE* file = std::fopen(crash_file, "wb")) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "input written to %s\n", crash_file);
  }
}

void on_abort(int) {
  write_current();
  std::_Exit(1);
}

Bytes read_file(const char* path) {
  Bytes bytes;
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) std::exit((std::fprintf(stderr, "cannot read %s\n", path), 2));
  for (int c; (c = std::fgetc(file)) != EOF;) bytes.push_back(std::uint8_t(c));
  std::fclose(file);
  return bytes;
}

using Random = std::mt19937_64;

std::uint8_t interesting(Random& random) {
  static const std::uint8_t kValues[] = {0, 1, 2, 3, 4, 7, 8, 64, 127, 128, 252, 253, 254, 255};
  return random() % 2 ? kValues[random() % sizeof kValues] : std::uint8_t(random());
}

Bytes mutated(Bytes bytes, const std::vector<Bytes>& corpus, Random& random) {
  for (std::uint64_t steps = 1 + random() % 4; steps > 0; --steps) {
    const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 6) {
      case 0:
        if (!bytes.empty()) bytes[at] ^= std::uint8_t(1u << random() % 8);
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = interesting(random);
        break;
      case 2:
        if (!bytes.empty()) bytes[at] = std::uint8_t(bytes[at] + (random() % 2 ? 1 : 255));
        break;
      case 3:
        bytes.insert(bytes.begin() + std::ptrdiff_t(at), 1 + random() % 8, interesting(random));
        break;
      case 4:
        if (!bytes.empty()) bytes.erase(bytes.begin() + std::ptrdiff_t(at));
        break;
      default: {
        const Bytes& other = corpus[random() % corpus.size()];
        const std::size_t from = other.empty() ? 0 : random() % other.size();
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + std::ptrdiff_t(from), other.end());
      }
    }
  }
  if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
  return bytes;
}

bool reaches_new_code(const Bytes& input) {
  const std::size_t before = seen_count;
  current = input;
  // A copy of just this size, so that a read beyond the input is seen.
  std::uint8_t* exact = new std::uint8_t[input.size()];
  if (!input.empty()) std::memcpy(exact, input.data(), input.size());
  LLVMFuzzerTestOneInput(exact, input.size());
  delete[] exact;
  return seen_count != before;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  std::uint8_t& mark = seen[(place ^ place >> 16) % kPlaces];
  seen_count += mark == 0;
  mark = 1;
}

int main(int argc, char** argv) {
  if (argc < 4) return std::fprintf(stderr, "usage: driver SECONDS CRASH_FILE SEED...\n"), 2;
  crash_file = argv[2];
  __sanitizer_set_death_callback(write_current);
  std::signal(SIGABRT, on_abort);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
  Random random(std::random_device{}());
  std::vector<Bytes> corpus;
  for (int i = 3; i < argc; ++i) {
    corpus.push_back(read_file(argv[i]));
    reaches_new_code(corpus.back());
  }
  std::uint64_t runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 256; ++i, ++runs) {
      Bytes input = mutated(corpus[random() % corpus.size()], corpus, random);
      if (reaches_new_code(input)) corpus.push_back(std::move(input));
    }
  }
  std::printf("%llu inputs, %zu places reached, %zu inputs kept, no fault\n", static_cast<unsigned long long>(runs),
              seen_count, corpus.size());
  return 0;
}
