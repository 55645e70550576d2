// What the tests of the negotiator share: statements that are short to write, outcomes as texts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "core/negotiator.h"
#include "samples.h"

namespace hvdtorch::test {

inline void say(Negotiator& negotiator, int rank, const OpDesc& d,
                std::optional<std::string> payload = std::nullopt) {
  negotiator.on_ready(rank, {share(d), std::move(payload)}, {});
}

// "a b | error c d": names that were agreed, decision by decision.
inline std::string outcome(const std::vector<Decision>& decisions) {
  std::string text;
  for (const auto& decision : decisions) {
    text += text.empty() ? "" : " | ";
    std::string names = decision.error ? "error" : "";
    if (decision.error) {
      check(decision.agreed.empty(), "a decision is an agreement or an error");
      for (const auto& name : decision.error->names) names += " " + name;
    }
    for (const auto& agreement : decision.agreed) {
      names += (names.empty() ? "" : " ") + agreement.desc->name;
    }
    text += names;
  }
  return text;
}
inline std::string outcome(Negotiator& negotiator) { return outcome(negotiator.take_decisions()); }

inline void say(Negotiator& negotiator, int rank, Ready ready) {
  negotiator.on_ready(rank, std::move(ready), {});
}

}  // namespace hvdtorch::test
