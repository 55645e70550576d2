// Runs the registered cases: all, or those whose listed name contains argv[1]; `--list` names them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "check.h"

namespace hvdtorch::test {
namespace {

std::vector<const Case*>& cases() {
  static std::vector<const Case*> registered;
  return registered;
}

std::string base_name(const char* path) {
  const std::string text = path;
  return text.substr(text.find_last_of('/') + 1);
}

bool passes(const Case& test) {
  std::string failure;
  try {
    test.body();
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "an exception that is no std::exception";
  }
  if (failure.empty()) {
    std::printf("ok    %s\n", test.name.c_str());
  } else {
    std::printf("FAIL  %s\n      %s\n", test.name.c_str(), failure.c_str());
  }
  std::fflush(stdout);
  return failure.empty();
}

}  // namespace

Case::Case(const std::string& name, std::function<void()> body, std::source_location where)
    : body(std::move(body)) {
  const std::string file = base_name(where.file_name());
  this->name = file.substr(0, file.rfind("_test.cc")) + ": " + name;
  cases().push_back(this);
}

void fail(const std::string& message, const Where& where) {
  throw CheckFailure(base_name(where.file_name()) + ":" + std::to_string(where.line()) + ": " +
                     message);
}

bool is_sanitized() noexcept {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

void run_ranks(int ranks, const std::function<void(int)>& body,
               const std::function<void()>& on_failure) {
  std::vector<std::exception_ptr> check_failures(ranks), others(ranks);
  std::once_flag failed;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
        return;
      } catch (const CheckFailure&) {
        check_failures[rank] = std::current_exception();
      } catch (...) {
        others[rank] = std::current_exception();
      }
      if (on_failure) std::call_once(failed, on_failure);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& errors : {check_failures, others}) {
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
}

}  // namespace hvdtorch::test

int main(int argc, char** argv) {
  using hvdtorch::test::Case;
  std::vector<const Case*> chosen = hvdtorch::test::cases();
  std::stable_sort(chosen.begin(), chosen.end(), [](const Case* a, const Case* b) {
    return a->name.substr(0, a->name.find(':')) < b->name.substr(0, b->name.find(':'));
  });
  if (argc > 1 && std::strcmp(argv[1], "--list") == 0) {
    for (const Case* test : chosen) std::printf("%s\n", test->name.c_str());
    return 0;
  }
  if (argc > 1) {
    std::erase_if(chosen,
                  [&](const Case* test) { return test->name.find(argv[1]) == std::string::npos; });
  }
  int passed = 0;
  for (const Case* test : chosen) passed += hvdtorch::test::passes(*test);
  const int failed = static_cast<int>(chosen.size()) - passed;
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;  // running nothing is no success
}
