#include "collective_checks.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace hvdtorch::test {
namespace {

Bytes joined(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes reduced(const Reduction& reduction, const std::vector<Bytes>& inputs, int64_t count) {
  Bytes result(count * size_of(reduction.dtype));
  std::vector<const void*> srcs;
  for (const Bytes& bytes : inputs) srcs.push_back(bytes.data());
  reduce(reduction, result.data(), srcs.data(), static_cast<int>(srcs.size()), count);
  return result;
}

Bytes slice(const Bytes& bytes, int64_t begin, int64_t length) {
  return {bytes.begin() + begin, bytes.begin() + begin + length};
}

std::string text_of(const char* what, const Transport& transport, int64_t size) {
  return std::string(what) + " of " + std::to_string(size) + ", rank " +
         std::to_string(transport.rank()) + " of " + std::to_string(transport.size());
}

}  // namespace

Bytes input(uint64_t round, int rank, int64_t bytes) {
  std::mt19937_64 random(round * 64 + rank);
  std::vector<uint64_t> words(bytes / 8 + 1);
  for (uint64_t& word : words) word = random();
  Bytes data(bytes);
  std::copy_n(reinterpret_cast<const uint8_t*>(words.data()), bytes, data.begin());
  return data;
}

void check_same(const Bytes& actual, const Bytes& expected, const std::string& what,
                const Where& where) {
  check_eq(actual.size(), expected.size(), what, where);
  const auto differ = std::mismatch(actual.begin(), actual.end(), expected.begin());
  if (differ.first != actual.end()) {
    fail(what + ": byte " + std::to_string(differ.first - actual.begin()) + " of " +
             std::to_string(actual.size()) + " differs",
         where);
  }
}

void check_allreduce(Transport& transport, const Reduction& reduction, int64_t count,
                     uint64_t round) {
  const int64_t bytes = count * size_of(reduction.dtype);
  std::vector<Bytes> inputs;
  for (int r = 0; r < transport.size(); ++r) inputs.push_back(input(round, r, bytes));
  Bytes data = inputs[transport.rank()];
  transport.allreduce(reduction, data.data(), count);
  check_same(data, reduced(reduction, inputs, count), text_of("allreduce", transport, count));
}

void check_reduce_scatter(Transport& transport, const Reduction& reduction,
                          const std::vector<int64_t>& counts, uint64_t round) {
  const int64_t element = size_of(reduction.dtype);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t before =
      std::accumulate(counts.begin(), counts.begin() + transport.rank(), int64_t{0});
  const int64_t own = counts[transport.rank()];
  std::vector<Bytes> inputs;
  for (int r = 0; r < transport.size(); ++r) inputs.push_back(input(round, r, total * element));
  Bytes out(own * element);
  transport.reduce_scatter(reduction, inputs[transport.rank()].data(), out.data(), counts);
  check_same(out, slice(reduced(reduction, inputs, total), before * element, own * element),
             text_of("reduce_scatter", transport, total));
}

void check_allgather(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round) {
  std::vector<Bytes> parts;
  for (int r = 0; r < transport.size(); ++r) parts.push_back(input(round, r, bytes[r]));
  const Bytes expected = joined(parts);
  const std::string what = text_of("allgather", transport, expected.size());
  Bytes out(expected.size());
  transport.allgather(parts[transport.rank()].data(), out.data(), bytes);
  check_same(out, expected, what);

  Bytes in_place(expected.size());  // with the own part where it will be
  const int64_t own = std::accumulate(bytes.begin(), bytes.begin() + transport.rank(), int64_t{0});
  std::copy(parts[transport.rank()].begin(), parts[transport.rank()].end(), in_place.begin() + own);
  transport.allgather(in_place.data() + own, in_place.data(), bytes);
  check_same(in_place, expected, what + " in place");
}

void check_broadcast(Transport& transport, int64_t bytes, int root, uint64_t round) {
  Bytes data = input(round, transport.rank(), bytes);
  transport.broadcast(data.data(), bytes, root);
  check_same(data, input(round, root, bytes),
             text_of("broadcast", transport, bytes) + " from " + std::to_string(root));
}

// bytes[from * P + to]
void check_alltoall(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round) {
  const int ranks = transport.size(), me = transport.rank();
  std::vector<int64_t> sent, received;
  std::vector<Bytes> in, expected;
  for (int r = 0; r < ranks; ++r) {
    sent.push_back(bytes[me * ranks + r]);
    received.push_back(bytes[r * ranks + me]);
    in.push_back(input(round + r, me, sent.back()));
    expected.push_back(input(round + me, r, received.back()));
  }
  const Bytes in_bytes = joined(in), expected_bytes = joined(expected);
  Bytes out(expected_bytes.size());
  transport.alltoall(in_bytes.data(), sent, out.data(), received);
  check_same(out, expected_bytes, text_of("alltoall", transport, out.size()));
}

}  // namespace hvdtorch::test
