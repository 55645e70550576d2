// Log lines of the core's own threads, which must not wait for Python: the same format and levels
// as hvdtorch/log.py, written at once.
#pragma once

#include <string>

namespace hvdtorch {

enum class LogLevel : int { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

// The least level that is written, and whether lines go without the time.
void configure_log(LogLevel least, bool hide_time) noexcept;

// Up to kInfo to stdout, from kWarning on to stderr. `where`: "stall.cc:31".
void log_line(LogLevel level, const std::string& where, const std::string& text) noexcept;

}  // namespace hvdtorch
