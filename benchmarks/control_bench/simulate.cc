// Simulated ranks around the real coordinator: what rank 0 reads, decides and writes per step, in
// bytes, frames and microseconds. No torch, no Python, no network: frames go from encoder to
// decoder through memory, so what the sockets cost comes on top.
//
//     simulate RANKS TENSORS STEPS
//
// plays STEPS steps in which every rank is ready for TENSORS tensors, said in one frame, and prints
// one line of JSON per kind of step:
//     bucket  a tensor of 1 MiB: one Ready per rank, one Launch
//     inline  a tensor of 4 bytes that travels with its Ready; its result with the log
// each for names that are new ("known": false) and for names that come back.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/coordinator.h"

namespace hvdtorch {
namespace {

using Clock = std::chrono::steady_clock;

// What one step cost at the coordinator.
struct Cost {
  int64_t frames_in = 0, bytes_in = 0, frames_out = 0, bytes_out = 0;
  double read_us = 0;    // decode statements, negotiate
  double decide_us = 0;  // plan launches, reduce what is inlined
  double write_us = 0;   // encode entries, hand them out
  double total_us() const { return read_us + decide_us + write_us; }
};

class Job {
 public:
  Job(int ranks, int tensors) : ranks_(ranks), coordinator_(options(ranks, tensors)) {
    for (int rank = 0; rank < ranks; ++rank) writers_.emplace_back(capacity(tensors));
    log_.emplace(capacity(tensors));
  }

  Cost step(const std::vector<Desc>& descs, const std::string* payload) {
    std::vector<std::string> frames(static_cast<size_t>(ranks_));
    for (int rank = 1; rank < ranks_; ++rank) {
      for (const Desc& desc : descs) {
        encode(frames[rank], ready_of(desc, payload), writers_[rank]);
      }
    }
    Cost cost;
    now_ += std::chrono::milliseconds(1);
    auto begin = Clock::now();
    for (const Desc& desc : descs) coordinator_.on_statement(0, ready_of(desc, payload), now_);
    for (int rank = 1; rank < ranks_; ++rank) coordinator_.on_frame(rank, frames[rank], now_);
    cost.read_us = since(begin);
    begin = Clock::now();
    const std::vector<Entry> entries = coordinator_.take_entries(now_);
    cost.decide_us = since(begin);
    std::string read;
    begin = Clock::now();
    coordinator_.distribute(entries, [&](int rank, std::string_view frame) {
      ++cost.frames_out;
      cost.bytes_out += static_cast<int64_t>(frame.size());
      if (rank == 1) read = frame;
    });
    cost.write_us = since(begin);
    for (const std::string& frame : frames) {
      cost.frames_in += !frame.empty();
      cost.bytes_in += static_cast<int64_t>(frame.size());
    }
    finish(entries);
    check(decode_entries(read, *log_), descs, payload != nullptr);
    return cost;
  }

 private:
  static uint32_t capacity(int tensors) {
    return std::max(1024u, 2u * static_cast<uint32_t>(tensors));
  }

  static Coordinator::Options options(int ranks, int tensors) {
    Coordinator::Options o;
    o.size = ranks;
    for (int rank = 0; rank < ranks; ++rank) o.hosts.push_back("host" + std::to_string(rank / 8));
    o.planner.fusion_threshold = 128 << 20;
    o.cache_capacity = capacity(tensors);
    o.stall_warn_after = std::chrono::seconds(60);
    return o;
  }

  static Ready ready_of(const Desc& desc, const std::string* payload) {
    return {desc, payload ? std::optional<std::string>(*payload) : std::nullopt};
  }

  static double since(Clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }

  // Rank 0, the lowest that took part, says that the launches are done.
  void finish(const std::vector<Entry>& entries) {
    int launched = 0;
    for (const Entry& entry : entries) launched += !std::get<Launch>(entry).inlined;
    if (launched > 0) coordinator_.on_launches_finished(0, launched);
  }

  // What rank 1 reads is every tensor once, in any number of launches.
  static void check(const std::vector<Entry>& entries, const std::vector<Desc>& descs,
                    bool inlined) {
    std::vector<std::string> read, said;
    for (const Entry& entry : entries) {
      const auto* launch = std::get_if<Launch>(&entry);
      if (!launch || launch->inlined != inlined) fail("an entry of another kind");
      for (const LaunchItem& item : launch->items) read.push_back(item.desc->name);
    }
    for (const Desc& desc : descs) said.push_back(desc->name);
    std::sort(read.begin(), read.end());
    std::sort(said.begin(), said.end());
    if (read != said) fail("other tensors than those that were ready");
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "simulate: the log holds %s\n", what);
    std::exit(1);
  }

  int ranks_;
  Coordinator coordinator_;
  std::vector<SlotWriter> writers_;  // of every rank's statements
  std::optional<LogSlots> log_;      // of rank 1
  Clock::time_point now_ = Clock::now();
};

Desc desc_of(const std::string& name, int64_t count) {
  OpDesc desc;
  desc.op = ReduceOp::kAverage;
  desc.name = name;
  desc.shape = {count};
  desc.site = "train.py:31";
  return std::make_shared<const OpDesc>(std::move(desc));
}

// Names as long as those of gradients.
std::vector<Desc> descs_of(const std::string& prefix, int tensors, int64_t count) {
  std::vector<Desc> descs;
  for (int i = 0; i < tensors; ++i) {
    descs.push_back(desc_of("allreduce." + prefix + ".layer.weight." + std::to_string(i), count));
  }
  return descs;
}

void print(const char* kind, bool known, int ranks, int tensors, std::vector<Cost> costs) {
  // The step of median time: its parts add up.
  const auto middle = costs.begin() + static_cast<std::ptrdiff_t>(costs.size() / 2);
  std::nth_element(costs.begin(), middle, costs.end(),
                   [](const Cost& a, const Cost& b) { return a.total_us() < b.total_us(); });
  std::printf(
      "{\"kind\": \"%s\", \"known\": %s, \"ranks\": %d, \"tensors\": %d, \"steps\": %zu, "
      "\"frames_in\": %lld, \"bytes_in\": %lld, \"frames_out\": %lld, \"bytes_out\": %lld, "
      "\"read_us\": %.3f, \"decide_us\": %.3f, \"write_us\": %.3f}\n",
      kind, known ? "true" : "false", ranks, tensors, costs.size(),
      static_cast<long long>(middle->frames_in), static_cast<long long>(middle->bytes_in),
      static_cast<long long>(middle->frames_out), static_cast<long long>(middle->bytes_out),
      middle->read_us, middle->decide_us, middle->write_us);
}

void measure(const char* kind, int ranks, int tensors, int steps, int64_t count,
             const std::string* payload) {
  std::vector<Cost> fresh, known;
  Job job(ranks, tensors);
  for (int step = 0; step < steps; ++step) {
    // Of equal length, so that all steps have as many bytes.
    const std::string name = std::to_string(1'000'000 + step);
    fresh.push_back(job.step(descs_of(name, tensors, count), payload));
  }
  const auto descs = descs_of("again", tensors, count);
  job.step(descs, payload);
  for (int step = 0; step < steps; ++step) known.push_back(job.step(descs, payload));
  print(kind, false, ranks, tensors, std::move(fresh));
  print(kind, true, ranks, tensors, std::move(known));
}

}  // namespace
}  // namespace hvdtorch

int main(int argc, char** argv) {
  const int ranks = argc == 4 ? std::atoi(argv[1]) : 0;
  const int tensors = argc == 4 ? std::atoi(argv[2]) : 0;
  const int steps = argc == 4 ? std::atoi(argv[3]) : 0;
  if (ranks < 2 || tensors < 1 || steps < 1) {
    std::fprintf(stderr, "usage: simulate RANKS TENSORS STEPS (2, 1 and 1 or more)\n");
    return 2;
  }
  const std::string payload(sizeof(float), '\0');
  hvdtorch::measure("bucket", ranks, tensors, steps, 1 << 18, nullptr);
  hvdtorch::measure("inline", ranks, tensors, steps, 1, &payload);
  return 0;
}
