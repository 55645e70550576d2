// The wire format: what is encoded is decoded equal, writer and reader of a stream keep agreeing on
// the slots, and bytes that no encoder made are a DecodeError and nothing worse.
#include "core/message.h"

#include <cstring>
#include <limits>

#include "allocations.h"
#include "check.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

// Both ends of one stream.
struct Stream {
  explicit Stream(uint32_t capacity) : writer(capacity), reader(capacity), log(capacity) {}

  void carry(const std::vector<Statement>& statements) {
    std::string frame;
    for (const auto& s : statements) encode(frame, s, writer);
    check_eq(texts_of(decode_statements(frame, reader)), texts_of(statements));
    last_frame = frame;
  }
  void carry(const std::vector<Entry>& entries) {
    std::string frame;
    for (const auto& e : entries) encode(frame, e, writer);
    check_eq(texts_of(decode_entries(frame, log)), texts_of(entries));
    last_frame = frame;
  }

  SlotWriter writer;
  SlotReader reader;
  LogSlots log;
  std::string last_frame;
};

OpDesc unusual() {
  OpDesc d;
  d.process_set = 0xfffffffe;
  d.kind = OpKind::kReducescatter;
  d.dtype = DataType::kFloat8E5M2Uz;
  d.device = {DeviceKind::kCuda, 32767};
  d.op = ReduceOp::kProduct;
  d.root = std::numeric_limits<int32_t>::min();
  d.prescale = -0.0;
  d.postscale = std::numeric_limits<double>::denorm_min();
  d.name = std::string("schicht/\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\0 \n\"", 22);
  d.shape = {3, 0, 1};
  d.group = std::string(40, 'g');
  d.group_size = std::numeric_limits<int32_t>::max();
  d.site = "dir with space/\xe8\xa8\x93.py:1";
  d.remembered = false;
  return d;
}

const Case round_trips("every record comes back as it was sent", [] {
  OpDesc scalar = allreduce_of("", {});
  OpDesc factors = allreduce_of("factors");
  factors.prescale = std::numeric_limits<double>::infinity();
  factors.postscale = std::numeric_limits<double>::quiet_NaN();
  OpDesc long_name = allreduce_of(std::string(1 << 20, 'x'), {1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (uint32_t capacity : {0u, 1u, 1024u}) {
    Stream ranks(capacity);
    ranks.carry({Ready{share(scalar), std::nullopt}, Ready{share(scalar), std::string()},
                 Ready{share(unusual()), std::string("\0\xff", 2)},
                 Ready{share(factors), std::string(100'000, 'p')},
                 Ready{share(long_name), std::nullopt}, Bye{"", true, 0},
                 Bye{"ValueError: \xe2\x82\xac", false, 1ull << 63}, Failed{""}, Failed{"reset"},
                 Finished{0, 1}, Finished{0xffffffff, 0xffffffff}, Excuse{0}, Excuse{-1.5},
                 Excuse{std::numeric_limits<double>::infinity()},
                 Excuse{std::numeric_limits<double>::quiet_NaN()}});
    Stream log(capacity);
    log.carry({Launch{false, {}, {{share(scalar), {}, ""}, {share(factors), {0, 7, 1}, ""}}},
               Launch{true, {}, {{share(long_name), {}, std::string(5000, '\0')}}},
               Launch{false, {0, 2, 3}, {{share(scalar), {5, -1}, ""}}}, Error{3, {}, {}, ""},
               Error{0, {1}, {"a", "", std::string(70'000, 'n')}, "text"}, Down{"", false, false},
               Down{"rank 2 is gone", true, false}, Down{"x", true, true}});
    Stream of_set(capacity);
    of_set.carry({Launch{true, {std::numeric_limits<int>::max()}, {{share(unusual()), {}, "r"}}}});
  }
});

const Case empty_frame("an empty frame holds no records", [] {
  SlotReader reader(4);
  LogSlots log(4);
  check(decode_statements("", reader).empty());
  check(decode_entries("", log).empty());
});

const Case known("a description travels once, and again after it changed", [] {
  Stream stream(8);
  OpDesc d = allreduce_of("layer1.weight", {64, 64});
  d.site = "train.py:7";
  stream.carry({Ready{share(d), std::nullopt}});
  const size_t first = stream.last_frame.size();
  stream.carry({Ready{share(d), std::nullopt}});
  check_eq(stream.last_frame.size(), 6u, "bytes of a repeated Ready");
  d.shape = {64, 63};
  stream.carry({Ready{share(d), std::nullopt}});
  check_eq(stream.last_frame.size(), first);
  stream.carry({Ready{share(d), std::nullopt}});
  check_eq(stream.last_frame.size(), 6u);
});

const Case site("another line of the script is no other statement", [] {
  SlotWriter writer(8);
  OpDesc d = allreduce_of("x");
  check(!writer.choose(share(d)).known);
  d.site = "elsewhere.py:1";
  check(writer.choose(share(d)).known);
});

const Case every_field("a change of any field is sent", [] {
  const std::vector<std::pair<const char*, std::function<void(OpDesc&)>>> changes = {
      {"kind", [](OpDesc& d) { d.kind = OpKind::kBroadcast; }},
      {"dtype", [](OpDesc& d) { d.dtype = DataType::kInt8; }},
      {"device kind", [](OpDesc& d) { d.device.kind = DeviceKind::kCuda; }},
      {"device index", [](OpDesc& d) { d.device.index = 3; }},
      {"op", [](OpDesc& d) { d.op = ReduceOp::kMin; }},
      {"root", [](OpDesc& d) { d.root = 1; }},
      {"prescale", [](OpDesc& d) { d.prescale = 2; }},
      {"postscale", [](OpDesc& d) { d.postscale = 2; }},
      {"shape", [](OpDesc& d) { d.shape = {4, 1}; }},
      {"group", [](OpDesc& d) { d.group = "g"; }},
      {"group size", [](OpDesc& d) { d.group_size = 2; }},
      {"process set", [](OpDesc& d) { d.process_set = 1; }},
  };
  for (const auto& [what, change] : changes) {
    Stream stream(8);
    OpDesc d = allreduce_of("x");
    stream.carry({Ready{share(d), std::nullopt}});
    change(d);
    stream.carry({Ready{share(d), std::nullopt}});
    check(stream.last_frame.size() > 6, what);
  }
});

const Case eviction("the least recently used description makes room", [] {
  SlotWriter writer(2);
  const Desc a = share(allreduce_of("a")), b = share(allreduce_of("b")),
             c = share(allreduce_of("c"));
  check_eq(writer.choose(a).slot, 0u);
  check_eq(writer.choose(b).slot, 1u);
  check(writer.choose(a).known);
  const auto third = writer.choose(c);
  check(third.slot == 1 && !third.known, "c takes b's slot");
  check(writer.choose(a).known);
  check(writer.choose(c).known);
  check(!writer.choose(b).known);
});

const Case unremembered("a name that will not come back takes no slot", [] {
  SlotWriter writer(1);
  OpDesc once = allreduce_of("once");
  once.remembered = false;
  const Desc kept = share(allreduce_of("kept"));
  writer.choose(kept);
  for (int i = 0; i < 2; ++i) {
    const auto choice = writer.choose(share(once));
    check(choice.slot == SlotWriter::kNoSlot && !choice.known);
  }
  check(writer.choose(kept).known);
});

const Case agreement("writer and reader agree over thousands of random records", [] {
  for (uint32_t capacity : {0u, 1u, 2u, 7u, 1024u}) {
    Random random(capacity + 1);
    Stream ranks(capacity), log(capacity);
    for (int round = 0; round < rounds(2000); ++round) {
      std::vector<Statement> statements;
      std::vector<Entry> entries;
      for (int n = random.below(6); n > 0; --n) {
        Ready ready{share(random_desc(random)), std::nullopt};
        if (random.one_in(3)) ready.payload = random_bytes(random, random.below(20));
        statements.push_back(std::move(ready));
      }
      for (int n = random.below(3); n > 0; --n) {
        Launch launch;
        launch.inlined = random.one_in(2);
        launch.absent = random_absent(random);
        for (int items = 1 + random.below(4); items > 0; --items) {
          OpDesc d = random_desc(random);
          d.process_set = 5;
          LaunchItem item{share(std::move(d)), {}, ""};
          for (int r = random.below(3); r > 0; --r) item.numbers.push_back(random.below(9));
          if (launch.inlined) item.result = random_bytes(random, random.below(20));
          launch.items.push_back(std::move(item));
        }
        entries.emplace_back(std::move(launch));
        if (random.one_in(4)) {
          entries.emplace_back(Error{0, random_absent(random), {"x", "y"}, "mismatch"});
        }
      }
      ranks.carry(statements);
      log.carry(entries);
    }
  }
});

const Case tables("each process set's log has slots of its own, until it is forgotten", [] {
  SlotWriter of_set[] = {SlotWriter(4), SlotWriter(4)};
  LogSlots log(4);
  const auto launch = [](uint32_t set, const std::string& name) {
    OpDesc d = allreduce_of(name);
    d.process_set = set;
    return Entry(Launch{false, {}, {{share(d), {}, ""}}});
  };
  std::string frame;
  for (int round = 0; round < 2; ++round) {
    frame.clear();
    std::vector<Entry> entries;
    for (uint32_t set : {0u, 1u}) {
      entries.push_back(launch(set, "x" + std::to_string(set)));  // both in slot 0
      encode(frame, entries.back(), of_set[set]);
    }
    check_eq(texts_of(decode_entries(frame, log)), texts_of(entries));
  }
  log.forget(1);
  check_throws<DecodeError>([&] { decode_entries(frame, log); });
  frame.clear();
  encode(frame, launch(0, "x0"), of_set[0]);
  check_eq(decode_entries(frame, log).size(), 1u);
});

// --- bytes that no encoder made -------------------------------------------------------------

template <typename T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string sample_statements() {
  SlotWriter writer(4);
  std::string frame;
  encode(frame, Ready{share(unusual()), std::string("payload")}, writer);
  for (int i = 0; i < 2; ++i) {
    encode(frame, Ready{share(allreduce_of("x")), std::nullopt}, writer);
  }
  encode(frame, Bye{"reason", false, 3}, writer);
  encode(frame, Failed{"text"}, writer);
  encode(frame, Finished{1, 2}, writer);
  encode(frame, Excuse{60}, writer);
  return frame;
}

std::string sample_entries() {
  SlotWriter writer(4);
  std::string frame;
  const Desc x = share(allreduce_of("x"));
  encode(frame, Launch{false, {}, {{x, {1, 2}, ""}, {x, {}, ""}}}, writer);
  encode(frame, Launch{true, {1, 4}, {{x, {}, "0123456789abcdef"}}}, writer);
  encode(frame, Error{0, {2}, {"x", "y"}, "text"}, writer);
  encode(frame, Down{"text", true, false}, writer);
  return frame;
}

// Fails on any exception but DecodeError. The bytes live in a buffer of exactly their size, so that
// ASan sees a read past them. True: they were decoded.
bool survives(const std::string& bytes, bool log) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  const std::string_view frame(exact.data(), exact.size());
  bool decoded = true;
  const size_t largest = largest_allocation([&] {
    SlotReader reader(4);
    LogSlots log_reader(4);
    try {
      if (log) {
        decode_entries(frame, log_reader);
      } else {
        decode_statements(frame, reader);
      }
    } catch (const DecodeError&) {
      decoded = false;
    }
  });
  check(largest <= 1024 + 32 * bytes.size(),
        "decoding " + std::to_string(bytes.size()) + " bytes allocated " + std::to_string(largest));
  return decoded;
}

const Case truncated("a frame cut anywhere is refused, or ends at a record", [] {
  for (const bool log : {false, true}) {
    const std::string frame = log ? sample_entries() : sample_statements();
    check(survives(frame, log));
    int whole = 0;
    for (size_t n = 0; n < frame.size(); ++n) whole += survives(frame.substr(0, n), log);
    check_eq(whole, log ? 4 : 7, "prefixes that are whole records");
  }
});

const Case flipped("a flipped bit or byte does no harm", [] {
  for (const bool log : {false, true}) {
    const std::string frame = log ? sample_entries() : sample_statements();
    for (size_t i = 0; i < frame.size(); ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string other = frame;
        other[i] = static_cast<char>(other[i] ^ (1 << bit));
        survives(other, log);
      }
      for (const char byte : {'\0', '\x7f', '\xff'}) {
        std::string other = frame;
        other[i] = byte;
        survives(other, log);
      }
    }
  }
});

const Case random_input("random bytes do no harm", [] {
  Random random(11);
  for (int round = 0; round < rounds(20'000); ++round) {
    std::string bytes = random_bytes(random, random.below(200));
    // A known record kind first, else nearly all are refused at their first byte.
    const char tags[] = {1, 2, 3, 4, 5, 6, 16, 17, 18};
    if (!bytes.empty()) bytes[0] = tags[random.below(sizeof tags)];
    survives(bytes, false);
    survives(bytes, true);
  }
});

void check_refused(const std::string& bytes, bool log, const std::string& why) {
  SlotReader reader(4);
  LogSlots log_reader(4);
  check_contains(check_throws<DecodeError>([&] {
                   log ? void(decode_entries(bytes, log_reader))
                       : void(decode_statements(bytes, reader));
                 }),
                 why);
  check(!survives(bytes, log));
}

// A description as it lies in a frame; the shape's dims are given.
std::string desc_bytes(const std::vector<int64_t>& shape, int32_t group_size = 1) {
  std::string out = raw<uint32_t>(0) + std::string("\0\x0b\0", 3) + raw<int16_t>(-1) + '\1' +
                    raw<int32_t>(0) + raw(1.0) + raw(1.0) + raw<uint32_t>(1) + "x" +
                    raw(static_cast<uint32_t>(shape.size()));
  for (int64_t dim : shape) out += raw(dim);
  return out + raw<uint32_t>(0) + raw(group_size) + raw<uint32_t>(0) + '\1';
}

std::string ready_new(const std::string& desc, uint32_t slot = 0) {
  return '\1' + raw(slot) + desc + '\0';
}

const Case lengths("a declared length of 2^32-1 is refused before anything is allocated", [] {
  const auto huge = raw<uint32_t>(0xffffffff);
  check_refused('\4' + huge + "text", false, "longer than its frame");
  check_refused('\3' + std::string("\1") + raw<uint64_t>(0) + huge, false, "longer than its frame");
  const std::string set = raw<uint32_t>(0);
  check_refused("\x10" + set + std::string("\0\0", 2) + huge + std::string(64, '\0'), true,
                "count is larger");
  check_refused("\x10" + set + std::string("\0\1", 2) + huge + std::string(64, '\0'), true,
                "longer than its frame");
  check_refused("\x11" + set + '\0' + huge + std::string(64, '\0'), true, "count is larger");
  // The shape's count is the 4 bytes after the name.
  std::string desc = desc_bytes({});
  const size_t at = desc.find('x') + 1;
  desc.replace(at, 4, huge);
  check_refused(ready_new(desc) + std::string(64, '\0'), false, "longer than its frame");
});

const Case shapes("a shape whose size cannot be computed is refused", [] {
  SlotReader reader(4);
  const auto decoded = decode_statements(ready_new(desc_bytes({2, 3})), reader);
  check_eq(text_of(*std::get<Ready>(decoded.front()).desc), text_of(allreduce_of("x", {2, 3})));
  const int64_t big = int64_t{1} << 62;
  check_refused(ready_new(desc_bytes({-1})), false, "negative or too large");
  check_refused(ready_new(desc_bytes({big, 4})), false, "negative or too large");
  check_refused(ready_new(desc_bytes({0, -1})), false, "negative or too large");
  check_refused(ready_new(desc_bytes({0, big, big})), false, "negative or too large");
});

const Case slots_out_of_range("a slot that was never described, or is none, is refused", [] {
  check_refused('\2' + raw<uint32_t>(0) + '\0', false, "never described");
  check_refused('\2' + raw<uint32_t>(3) + '\0', false, "never described");
  check_refused('\2' + raw<uint32_t>(0xffffffff) + '\0', false, "never described");
  check_refused(ready_new(desc_bytes({1}), 4), false, "beyond the agreed capacity");
  check_refused(ready_new(desc_bytes({1}), 0xfffffffe), false, "beyond the agreed capacity");
});

const Case absent("absent ranks are ascending ranks, and a launch is of one process set", [] {
  const auto launch = [](const std::vector<int64_t>& ranks) {
    std::string frame = "\x10" + raw<uint32_t>(0) + std::string("\0\1", 2) +
                        raw(static_cast<uint32_t>(ranks.size()));
    for (int64_t rank : ranks) frame += raw(rank);
    return frame + raw<uint32_t>(1) + raw<uint32_t>(0) + '\0' + desc_bytes({1}) + '\0';
  };
  LogSlots log(4);
  const auto decoded = decode_entries(launch({0, 3}), log);
  check_eq(std::get<Launch>(decoded.front()).absent, std::vector<int>{0, 3});
  for (const std::vector<int64_t>& wrong : std::vector<std::vector<int64_t>>{
           {-1}, {2, 2}, {2, 1}, {int64_t{1} << 31}, {0, std::numeric_limits<int64_t>::max()}}) {
    check_refused(launch(wrong), true, "not ascending");
  }
  OpDesc other = allreduce_of("y");
  other.process_set = 1;
  SlotWriter writer(4);
  std::string frame;
  encode(frame, Launch{false, {}, {{share(allreduce_of("x")), {}, ""}, {share(other), {}, ""}}},
         writer);
  check_refused(frame, true, "launch of two process sets");
});

const Case values("unknown kinds, flags and counts are refused", [] {
  check_refused(std::string(1, '\0'), false, "unknown record");
  check_refused("\x10", false, "unknown record");
  check_refused("\x01", true, "unknown record");
  check_refused("\xff", true, "unknown record");
  check_refused("\x03\x02", false, "flag");
  check_refused(ready_new(desc_bytes({1}, 0)), false, "group without members");
  check_refused(ready_new(desc_bytes({1}, -5)), false, "group without members");
  check_refused("\x10" + raw<uint32_t>(0) + std::string(2, '\0') + raw<uint32_t>(0), true,
                "launch of nothing");
  check_refused("\x05", true, "unknown record");
  check_refused("\x05" + raw<uint32_t>(0) + "\1", false, "longer than its frame");
  check_refused("\x06\1", false, "longer than its frame");
  const auto with = [](size_t offset, char value) {
    std::string desc = desc_bytes({1});
    desc[offset] = value;
    return ready_new(desc);
  };
  check_refused(with(4, kNumOpKinds), false, "operation kind");
  check_refused(with(5, kNumDataTypes), false, "dtype");
  check_refused(with(6, 2), false, "device kind");
  check_refused(with(9, kNumReduceOps), false, "reduce op");
});

}  // namespace
}  // namespace hvdtorch::test
