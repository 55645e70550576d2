#include "core/operation.h"

#include <cmath>

namespace hvdtorch {

bool same_factor(double a, double b) noexcept { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same_statement(const OpDesc& a, const OpDesc& b) noexcept {
  return a.process_set == b.process_set && a.kind == b.kind && a.dtype == b.dtype &&
         a.device == b.device && a.op == b.op && a.root == b.root &&
         same_factor(a.prescale, b.prescale) && same_factor(a.postscale, b.postscale) &&
         a.group_size == b.group_size && a.remembered == b.remembered && a.name == b.name &&
         a.shape == b.shape && a.group == b.group;
}

}  // namespace hvdtorch
