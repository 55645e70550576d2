// Frames on a stream of bytes, whatever carries it: a 4-byte length and that many bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

// A frame is a batch of small records; anything longer is not one of ours.
inline constexpr uint32_t kMaxFrame = 256u << 20;

// What precedes `frame`. Throws std::length_error if it is longer than the peer would accept.
std::array<char, sizeof(uint32_t)> frame_header(std::string_view frame);

// Moves whole frames from the front of `in` to `events`; false at an impossible length.
bool split_frames(std::string& in, int rank, std::vector<Channel::Event>& events);

}  // namespace hvdtorch
