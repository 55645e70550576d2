// The test harness of the C++ core: named cases, checks that say where and what, one summary.
//
//   const Case exact("int average truncates toward zero", [] { check_eq(average(-3, 2), -1); });
//
// A case is registered by its constructor and listed as "<subject>: <name>", where the subject is
// the file's name without "_test.cc". A check that fails throws, which ends its case; on another
// thread than the case's own, use run_ranks(), which brings the exception back.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace hvdtorch::test {

struct Case {
  Case(const std::string& name, std::function<void()> body,
       std::source_location where = std::source_location::current());

  std::string name;
  std::function<void()> body;
};

struct CheckFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Where = std::source_location;

// Throws CheckFailure "file:line: message".
[[noreturn]] void fail(const std::string& message, const Where& where = Where::current());

// True: sanitizers make every step 5 to 20 times slower, so that soaks should do fewer rounds.
bool is_sanitized() noexcept;

inline void check(bool condition, const std::string& message = "check failed",
                  const Where& where = Where::current()) {
  if (!condition) fail(message, where);
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream text;
  if constexpr (requires { text << value; }) {
    if constexpr (sizeof(T) == 1 && std::is_integral_v<T>) {
      text << static_cast<int>(value);  // int8_t and uint8_t are numbers here, not characters
    } else {
      text << value;
    }
  } else if constexpr (requires { value.begin(); }) {
    text << "[";
    for (const auto& item : value) text << (text.str().size() > 1 ? ", " : "") << show(item);
    text << "]";
  } else {
    text << "<" << sizeof(T) << " bytes>";
  }
  return text.str();
}

template <typename A, typename B>
void check_eq(const A& actual, const B& expected, const std::string& what = "",
              const Where& where = Where::current()) {
  if (actual == expected) return;
  fail((what.empty() ? "" : what + ": ") + "got " + show(actual) + ", expected " + show(expected),
       where);
}

inline void check_contains(const std::string& text, const std::string& part,
                           const Where& where = Where::current()) {
  if (text.find(part) == std::string::npos) {
    fail("\"" + text + "\" does not contain \"" + part + "\"", where);
  }
}

// Runs `body`, which must throw an E (or a class derived from it); returns the exception's text.
template <typename E>
std::string check_throws(const std::function<void()>& body, const Where& where = Where::current()) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  fail("expected an exception, none was thrown", where);
}

// body(rank) on `ranks` threads at once; returns when all have ended. Rethrows the exception of the
// lowest rank that threw a CheckFailure, else of the lowest that threw anything. `on_failure`, if
// given, is called once, when the first rank throws: make it wake the others.
void run_ranks(int ranks, const std::function<void(int)>& body,
               const std::function<void()>& on_failure = {});

}  // namespace hvdtorch::test
