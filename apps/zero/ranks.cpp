#include "apps/zero/ranks.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/agreement.h"
#include "zero/comm/launcher.h"

namespace zero::app {
namespace {

int run_rank(bool alone, const std::function<int(const std::shared_ptr<comm::Group>&)>& body) {
  install_host_allocator();
  const auto group = zero::init();
  try {
    return body(group);
  } catch (const comm::PeerFailure&) {
    // The peer reports. Its launcher should see it end first, so that its status is the job's.
    try {
      group->barrier("the end of a failed run");
    } catch (const Error&) {
    }
    std::fflush(stdout);
    std::_Exit(kFailed);
  } catch (const std::exception& error) {
    if (alone) throw;
    // Exits at once and without leaving the group: the others must not end before this rank, whose
    // message explains theirs.
    std::_Exit(report(error));
  }
}

}  // namespace

Ranks choose_ranks(std::optional<int> nproc, int otherwise) {
  auto job = comm::job_from_environment();
  if (job.size > 1 && nproc && *nproc != job.size) {
    throw ConfigError(fmt::format("--nproc is {}, but {} has started {} ranks. Leave --nproc out.",
                                  *nproc, job.launcher, job.size));
  }
  const int size =
      job.size > 1 ? job.size : nproc.value_or(job.launcher.empty() ? otherwise : job.size);
  if (size < 1) throw ConfigError(fmt::format("--nproc is {}; it should be at least 1.", size));
  return {std::move(job), size};
}

int start_ranks(const Ranks& ranks, const std::vector<std::string>& words,
                const Arguments& arguments) {
  comm::LaunchOptions launch{.nproc = ranks.size()};
  launch.command = {"/proc/self/exe"};
  launch.command.insert(launch.command.end(), words.begin(), words.end());
  launch.command.insert(launch.command.end(), arguments.begin(), arguments.end());
  return comm::launch(launch);
}

int run_on_ranks(const Ranks& ranks, const std::vector<std::string>& words,
                 const Arguments& arguments,
                 const std::function<int(const std::shared_ptr<comm::Group>&)>& body) {
  if (ranks.launched() || ranks.size() == 1) return run_rank(ranks.size() == 1, body);
  return start_ranks(ranks, words, arguments);
}

}  // namespace zero::app
