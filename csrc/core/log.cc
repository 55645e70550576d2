#include "core/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>

namespace hvdtorch {
namespace {

std::atomic<int> least_level{static_cast<int>(LogLevel::kWarning)};
std::atomic<bool> without_time{false};

std::string time_text() {
  timeval now;
  gettimeofday(&now, nullptr);
  tm parts;
  localtime_r(&now.tv_sec, &parts);
  char date[32], text[48];
  std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", &parts);
  std::snprintf(text, sizeof(text), "%s.%06ld: ", date, static_cast<long>(now.tv_usec));
  return text;
}

}  // namespace

void configure_log(LogLevel least, bool hide_time) noexcept {
  least_level = static_cast<int>(least);
  without_time = hide_time;
}

void log_line(LogLevel level, const std::string& where, const std::string& text) noexcept {
  if (static_cast<int>(level) < least_level) return;
  try {
    const std::string line = "[" + (without_time ? "" : time_text()) +
                             "TDIWEF"[static_cast<int>(level)] + " " + where + "] " + text + "\n";
    const int fd = level >= LogLevel::kWarning ? STDERR_FILENO : STDOUT_FILENO;
    // One write, so that lines of several ranks do not mix. What a full pipe refuses is lost.
    [[maybe_unused]] const auto written = write(fd, line.data(), line.size());
  } catch (const std::exception&) {  // no memory for a log line
  }
}

}  // namespace hvdtorch
