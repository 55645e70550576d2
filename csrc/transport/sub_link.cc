#include "transport/sub_link.h"

#include <algorithm>
#include <utility>

namespace hvdtorch {
namespace {

class SubLink final : public PointToPoint {
 public:
  SubLink(std::shared_ptr<PointToPoint> base, std::vector<int> ranks, int first_tag)
      : base_(std::move(base)), ranks_(std::move(ranks)), first_tag_(first_tag) {
    const auto self = std::lower_bound(ranks_.begin(), ranks_.end(), base_->rank());
    rank_ = static_cast<int>(self - ranks_.begin());
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(ranks_.size()); }

  std::unique_ptr<Request> send(const void* data, size_t bytes, int to, int tag) override {
    return base_->send(data, bytes, ranks_[static_cast<size_t>(to)], first_tag_ + tag);
  }
  std::unique_ptr<Request> recv(void* data, size_t bytes, int from, int tag) override {
    return base_->recv(data, bytes, ranks_[static_cast<size_t>(from)], first_tag_ + tag);
  }

 private:
  const std::shared_ptr<PointToPoint> base_;
  const std::vector<int> ranks_;  // by rank here: rank in the base
  const int first_tag_;
  int rank_;
};

}  // namespace

std::shared_ptr<PointToPoint> make_sub_link(std::shared_ptr<PointToPoint> base,
                                            std::vector<int> ranks, int channel,
                                            int tags_per_channel) {
  return std::make_shared<SubLink>(std::move(base), std::move(ranks), channel * tags_per_channel);
}

}  // namespace hvdtorch
