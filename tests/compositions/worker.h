// A process of its own for cases, which may crash or hang without harm to who asks.
#pragma once

#include <sys/types.h>

#include <chrono>

#include "tests/compositions/choices.h"
#include "tests/compositions/run.h"

namespace zero::compositions {

class Worker {
 public:
  explicit Worker(std::chrono::seconds limit) : limit_(limit) {}
  ~Worker() { end(false); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Runs a case there. A crash, or a case that takes longer than the limit, is a failure.
  Verdict run(const Case& given);

 private:
  void begin();
  void end(bool hangs);
  std::chrono::seconds limit_;
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
  int cases_ = 0;
  int status_ = 0;  // the last process ended with it
};

}  // namespace zero::compositions
