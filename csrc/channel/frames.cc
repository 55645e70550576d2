#include "channel/frames.h"

#include <cstring>
#include <stdexcept>

namespace hvdtorch {

std::array<char, sizeof(uint32_t)> frame_header(std::string_view frame) {
  if (frame.size() > kMaxFrame) throw std::length_error("a control frame is too long");
  const auto length = static_cast<uint32_t>(frame.size());
  std::array<char, sizeof length> header;
  std::memcpy(header.data(), &length, sizeof length);
  return header;
}

bool split_frames(std::string& in, int rank, std::vector<Channel::Event>& events) {
  size_t at = 0;
  uint32_t length;
  while (in.size() - at >= sizeof length) {
    std::memcpy(&length, in.data() + at, sizeof length);
    if (length > kMaxFrame) return false;
    if (in.size() - at - sizeof length < length) break;
    events.push_back({Channel::Event::Kind::kFrame, rank, in.substr(at + sizeof length, length)});
    at += sizeof length + length;
  }
  in.erase(0, at);
  return true;
}

}  // namespace hvdtorch
