// The harness itself: a check that cannot fail would make every other test worthless.
#include "check.h"

namespace hvdtorch::test {
namespace {

const Case throwing("a failed check throws what and where", [] {
  const std::string text =
      check_throws<CheckFailure>([] { check_eq(std::vector<int>{1, 2}, std::vector<int>{1, 3}); });
  check_contains(text, "harness_test.cc:");
  check_contains(text, "got [1, 2], expected [1, 3]");
  check_throws<CheckFailure>([] { check(false); });
  check_throws<CheckFailure>([] { check_contains("abc", "d"); });
  check_throws<CheckFailure>([] { check_throws<std::runtime_error>([] {}); });
});

const Case ranks("run_ranks prefers a rank's check failure over what it caused elsewhere", [] {
  bool woken = false;
  const std::string text = check_throws<CheckFailure>([&] {
    run_ranks(
        3, [](int rank) { rank == 2 ? fail("root cause") : throw std::runtime_error("aborted"); },
        [&] { woken = true; });
  });
  check_contains(text, "root cause");
  check(woken);
});

}  // namespace
}  // namespace hvdtorch::test
