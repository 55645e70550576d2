#include "core/message.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hvdtorch {
namespace {

// Note [Slots]
// In steady state a training step submits the same names with the same shapes. Each direction of
// each stream therefore keeps a table: the sender assigns a slot to a description the first time
// (record "new": slot + description) and afterwards sends the slot only (record "again"). The
// sender evicts; a "new" for an occupied slot overwrites it on the receiver. No negotiation and no
// invalidation messages exist, since a stream is ordered. The log is one stream for each process
// set: every member's reader sees the same bytes. The site (file:line) is taken along with a "new"
// only.

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

enum class Tag : uint8_t {
  kReadyNew = 1,
  kReadyAgain = 2,
  kBye = 3,
  kFailed = 4,
  kFinished = 5,
  kExcuse = 6,
  kLaunch = 16,
  kError = 17,
  kDown = 18,
};

template <typename T>
void put(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.append(raw, sizeof(T));
}

void put_text(std::string& out, std::string_view text) {
  put<uint32_t>(out, static_cast<uint32_t>(text.size()));
  out.append(text);
}

void put_ints(std::string& out, const std::vector<int64_t>& values) {
  put<uint32_t>(out, static_cast<uint32_t>(values.size()));
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
}

void put_absent(std::string& out, const std::vector<int>& ranks) {
  put<uint8_t>(out, ranks.empty() ? 0 : 1);
  if (!ranks.empty()) put_ints(out, {ranks.begin(), ranks.end()});
}

// Reads from a frame; every method checks what is left first.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : left_(bytes) {}
  bool empty() const { return left_.empty(); }

  std::string_view take(size_t n) {
    if (n > left_.size()) throw DecodeError("record is longer than its frame");
    auto head = left_.substr(0, n);
    left_.remove_prefix(n);
    return head;
  }
  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string text() { return std::string(take(get<uint32_t>())); }
  std::vector<int64_t> ints() {
    const size_t n = get<uint32_t>();
    const auto raw = take(n * sizeof(int64_t));
    std::vector<int64_t> values(n);
    if (n != 0) std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }
  bool flag() {
    const auto value = get<uint8_t>();
    if (value > 1) throw DecodeError("a flag is neither 0 nor 1");
    return value == 1;
  }
  template <typename E>
  E choice(int count, const char* what) {
    const auto value = get<uint8_t>();
    if (value >= count) throw DecodeError(std::string("unknown ") + what);
    return static_cast<E>(value);
  }
  // A count of records each at least `min_bytes` long: bounds what the caller may reserve.
  size_t count(size_t min_bytes) {
    const size_t n = get<uint32_t>();
    if (n > left_.size() / min_bytes) throw DecodeError("count is larger than its frame");
    return n;
  }

 private:
  std::string_view left_;
};

void put_desc(std::string& out, const OpDesc& d) {
  put<uint32_t>(out, d.process_set);
  put<uint8_t>(out, static_cast<uint8_t>(d.kind));
  put<uint8_t>(out, static_cast<uint8_t>(d.dtype));
  put<uint8_t>(out, static_cast<uint8_t>(d.device.kind));
  put<int16_t>(out, d.device.index);
  put<uint8_t>(out, static_cast<uint8_t>(d.op));
  put<int32_t>(out, d.root);
  put<double>(out, d.prescale);
  put<double>(out, d.postscale);
  put_text(out, d.name);
  put_ints(out, d.shape);
  put_text(out, d.group);
  put<int32_t>(out, d.group_size);
  put_text(out, d.site);
  put<uint8_t>(out, d.remembered ? 1 : 0);
}

Desc get_desc(Cursor& in) {
  auto desc = std::make_shared<OpDesc>();
  OpDesc& d = *desc;
  d.process_set = in.get<uint32_t>();
  d.kind = in.choice<OpKind>(kNumOpKinds, "operation kind");
  d.dtype = in.choice<DataType>(kNumDataTypes, "dtype");
  d.device.kind = in.choice<DeviceKind>(2, "device kind");
  d.device.index = in.get<int16_t>();
  d.op = in.choice<ReduceOp>(kNumReduceOps, "reduce op");
  d.root = in.get<int32_t>();
  d.prescale = in.get<double>();
  d.postscale = in.get<double>();
  d.name = in.text();
  d.shape = in.ints();
  // Dimensions of 0 are left out: the size of a row must be computable as well.
  int64_t bytes = size_of(d.dtype);
  for (int64_t dim : d.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(dim, 1), &bytes)) {
      throw DecodeError("a shape is negative or too large");
    }
  }
  d.group = in.text();
  d.group_size = in.get<int32_t>();
  if (d.group_size < 1) throw DecodeError("a group without members");
  d.site = in.text();
  d.remembered = in.flag();
  return desc;
}

std::vector<int> get_absent(Cursor& in) {
  std::vector<int> ranks;
  if (!in.flag()) return ranks;
  for (int64_t rank : in.ints()) {
    const int64_t least = ranks.empty() ? 0 : ranks.back() + int64_t{1};
    if (rank < least || rank > INT32_MAX) throw DecodeError("absent ranks are not ascending");
    ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

constexpr uint8_t kHasPayload = 1;

Ready get_ready(Cursor& in, SlotReader& slots, bool is_new) {
  Ready ready;
  const auto slot = in.get<uint32_t>();
  if (is_new) {
    ready.desc = get_desc(in);
    if (slot != SlotWriter::kNoSlot) slots.set(slot, ready.desc);
  } else {
    ready.desc = slots.get(slot);
  }
  if (in.flag()) ready.payload = in.text();
  return ready;
}

Launch get_launch(Cursor& in, LogSlots& log_slots) {
  Launch launch;
  const auto process_set = in.get<uint32_t>();
  SlotReader& slots = log_slots.of(process_set);
  launch.inlined = in.flag();
  launch.absent = get_absent(in);
  const size_t n = in.count(6);
  if (n == 0) throw DecodeError("a launch of nothing");
  launch.items.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    LaunchItem item;
    const auto slot = in.get<uint32_t>();
    if (in.flag()) {
      item.desc = slots.get(slot);
    } else {
      item.desc = get_desc(in);
      if (slot != SlotWriter::kNoSlot) slots.set(slot, item.desc);
    }
    if (item.desc->process_set != process_set) throw DecodeError("a launch of two process sets");
    if (in.flag()) item.numbers = in.ints();
    if (launch.inlined) item.result = in.text();
    launch.items.push_back(std::move(item));
  }
  return launch;
}

Error get_error(Cursor& in) {
  Error error;
  error.process_set = in.get<uint32_t>();
  error.absent = get_absent(in);
  const size_t n = in.count(4);
  for (size_t i = 0; i < n; ++i) error.names.push_back(in.text());
  error.text = in.text();
  return error;
}

Tag get_tag(Cursor& in) { return static_cast<Tag>(in.get<uint8_t>()); }

}  // namespace

std::string SlotWriter::key_of(const OpDesc& desc) {
  return std::to_string(desc.process_set) + '/' + desc.name;
}

SlotWriter::Choice SlotWriter::choose(const Desc& desc) {
  if (capacity_ == 0 || !desc->remembered) return {kNoSlot, false};
  std::string key = key_of(*desc);
  auto found = by_name_.find(key);
  if (found != by_name_.end()) {
    items_.splice(items_.begin(), items_, found->second);
    Item& item = items_.front();
    if (same_statement(*item.desc, *desc)) return {item.slot, true};
    item.desc = desc;
    return {item.slot, false};
  }
  auto slot = static_cast<uint32_t>(items_.size());
  if (slot == capacity_) {
    const Item& oldest = items_.back();
    slot = oldest.slot;
    by_name_.erase(key_of(*oldest.desc));
    items_.pop_back();
  }
  items_.push_front({desc, slot});
  by_name_.emplace(std::move(key), items_.begin());
  return {slot, false};
}

void SlotReader::set(uint32_t slot, Desc desc) {
  if (slot >= capacity_) throw DecodeError("a slot is beyond the agreed capacity");
  if (slot >= slots_.size()) slots_.resize(slot + 1);
  slots_[slot] = std::move(desc);
}

const Desc& SlotReader::get(uint32_t slot) const {
  if (slot >= slots_.size() || !slots_[slot]) throw DecodeError("a slot that was never described");
  return slots_[slot];
}

void encode(std::string& frame, const Statement& statement, SlotWriter& slots) {
  if (const auto* ready = std::get_if<Ready>(&statement)) {
    const auto [slot, known] = slots.choose(ready->desc);
    put<uint8_t>(frame, static_cast<uint8_t>(known ? Tag::kReadyAgain : Tag::kReadyNew));
    put<uint32_t>(frame, slot);
    if (!known) put_desc(frame, *ready->desc);
    put<uint8_t>(frame, ready->payload ? kHasPayload : 0);
    if (ready->payload) put_text(frame, *ready->payload);
  } else if (const auto* finished = std::get_if<Finished>(&statement)) {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kFinished));
    put<uint32_t>(frame, finished->process_set);
    put<uint32_t>(frame, finished->launches);
  } else if (const auto* excuse = std::get_if<Excuse>(&statement)) {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kExcuse));
    put<double>(frame, excuse->seconds);
  } else if (const auto* bye = std::get_if<Bye>(&statement)) {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kBye));
    put<uint8_t>(frame, bye->clean ? 1 : 0);
    put<uint64_t>(frame, bye->launches);
    put_text(frame, bye->reason);
  } else {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kFailed));
    put_text(frame, std::get<Failed>(statement).text);
  }
}

void encode(std::string& frame, const Entry& entry, SlotWriter& slots) {
  if (const auto* launch = std::get_if<Launch>(&entry)) {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kLaunch));
    put<uint32_t>(frame, launch->items.front().desc->process_set);
    put<uint8_t>(frame, launch->inlined ? 1 : 0);
    put_absent(frame, launch->absent);
    put<uint32_t>(frame, static_cast<uint32_t>(launch->items.size()));
    for (const auto& item : launch->items) {
      const auto [slot, known] = slots.choose(item.desc);
      put<uint32_t>(frame, slot);
      put<uint8_t>(frame, known ? 1 : 0);
      if (!known) put_desc(frame, *item.desc);
      put<uint8_t>(frame, item.numbers.empty() ? 0 : 1);
      if (!item.numbers.empty()) put_ints(frame, item.numbers);
      if (launch->inlined) put_text(frame, item.result);
    }
  } else if (const auto* error = std::get_if<Error>(&entry)) {
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kError));
    put<uint32_t>(frame, error->process_set);
    put_absent(frame, error->absent);
    put<uint32_t>(frame, static_cast<uint32_t>(error->names.size()));
    for (const auto& name : error->names) put_text(frame, name);
    put_text(frame, error->text);
  } else {
    const auto& down = std::get<Down>(entry);
    put<uint8_t>(frame, static_cast<uint8_t>(Tag::kDown));
    put<uint8_t>(frame, down.abort ? 1 : 0);
    put<uint8_t>(frame, down.last ? 1 : 0);
    put_text(frame, down.text);
  }
}

std::vector<Statement> decode_statements(std::string_view frame, SlotReader& slots) {
  Cursor in(frame);
  std::vector<Statement> statements;
  while (!in.empty()) {
    switch (get_tag(in)) {
      case Tag::kReadyNew:
        statements.emplace_back(get_ready(in, slots, true));
        break;
      case Tag::kReadyAgain:
        statements.emplace_back(get_ready(in, slots, false));
        break;
      case Tag::kFinished: {
        Finished finished;
        finished.process_set = in.get<uint32_t>();
        finished.launches = in.get<uint32_t>();
        statements.emplace_back(finished);
        break;
      }
      case Tag::kExcuse:
        statements.emplace_back(Excuse{in.get<double>()});
        break;
      case Tag::kBye: {
        Bye bye;
        bye.clean = in.flag();
        bye.launches = in.get<uint64_t>();
        bye.reason = in.text();
        statements.emplace_back(std::move(bye));
        break;
      }
      case Tag::kFailed:
        statements.emplace_back(Failed{in.text()});
        break;
      default:
        throw DecodeError("unknown record from a rank");
    }
  }
  return statements;
}

std::vector<Entry> decode_entries(std::string_view frame, LogSlots& slots) {
  Cursor in(frame);
  std::vector<Entry> entries;
  while (!in.empty()) {
    switch (get_tag(in)) {
      case Tag::kLaunch:
        entries.emplace_back(get_launch(in, slots));
        break;
      case Tag::kError:
        entries.emplace_back(get_error(in));
        break;
      case Tag::kDown: {
        Down down;
        down.abort = in.flag();
        down.last = in.flag();
        down.text = in.text();
        entries.emplace_back(std::move(down));
        break;
      }
      default:
        throw DecodeError("unknown record in the log");
    }
  }
  return entries;
}

}  // namespace hvdtorch
