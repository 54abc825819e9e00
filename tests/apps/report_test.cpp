// `zero report` as a user runs it, on runs of `zero train`.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/apps/train_run.h"
#include "zero/comm/socket.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

Outcome report(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {ZERO_PROGRAM, "report"});
  return run(arguments);
}

TEST(ReportProgram, ShowsARunWithItsPlanAndItsOrigins) {
  const TrainFolder folder;
  write_file(folder / "ds.json", R"({"gradient_clipping": 0.5})");
  const auto trained =
      folder.train({"--config", folder / "ds.json", "--stage", "3", "--save-every", "3"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto outcome = report({folder.out().string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("6 steps"));
  const auto page = read_file(folder.out() / "report.html");
  for (const auto* says :
       {"finished after step 6", "plan: activations", "rank 1: optimizer", "A checkpoint of ",
        "<td>gradient_clipping</td><td>0.5</td><td>file</td>",
        "<td>zero_optimization.stage</td><td>3</td><td>command line</td>", "reduce_scatter"})
    EXPECT_THAT(page, HasSubstr(says));
  EXPECT_THAT(page, Not(HasSubstr("There is no plan")));
  // A run that goes on has the options of its checkpoint.
  const auto resumed =
      run({ZERO_PROGRAM, "train", "--resume", "--out", folder.out(), "--steps", "8"});
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  const auto two =
      report({folder.out().string(), folder.out().string(), "--out", folder / "two.html"});
  ASSERT_EQ(two.status, 0) << two.err;
  EXPECT_EQ(report({folder.out().string(), "--watch"}).status, 0);  // it has ended
  const auto again = read_file(folder.out() / "report.html");
  for (const auto* says : {"finished after step 8", "The run went on from the checkpoint of step 6",
                           "<td>gradient_clipping</td><td>0.5</td><td>checkpoint</td>",
                           "<td>train.steps</td><td>8</td><td>command line</td>"})
    EXPECT_THAT(again, HasSubstr(says));
  EXPECT_THAT(again, Not(HasSubstr("http-equiv='refresh'")));
}

// Returns what a server answers to a request.
std::string answer_of(uint16_t port, const std::string& request) {
  std::string reason;
  const auto socket = comm::connect_to("127.0.0.1", port, reason);
  if (!socket) return "no connection: " + reason;
  EXPECT_EQ(fcntl(socket.get(), F_SETFL, 0), 0);  // reads wait
  EXPECT_EQ(send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  std::array<char, 4096> bytes;
  for (ssize_t size = 1; size > 0;) {
    size = recv(socket.get(), bytes.data(), bytes.size(), 0);
    answer.append(bytes.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
  }
  return answer;
}

TEST(ReportProgram, ServesAPageThatIsWatched) {
  const TrainFolder folder;
  ASSERT_EQ(folder.train({}).status, 0);
  const auto log = folder.out() / "log.jsonl";
  const auto whole = read_file(log);
  const auto end = whole.rfind('\n', whole.rfind("\"event\":\"end\""));
  ASSERT_NE(end, std::string::npos);
  write_file(log, whole.substr(0, end + 1));  // as of a run that goes on
  uint16_t port = 0;
  {
    const auto free = comm::listen_at("127.0.0.1", 0);
    port = comm::own_port(free.socket);
  }
  auto watched = std::async(std::launch::async, [&] {
    return report(
        {folder.out().string(), "--watch", "--every", "1", "--port", std::to_string(port)});
  });
  const auto get = [&](const std::string& line, const std::string& host = "") {
    return answer_of(
        port, line + "\r\nHost: " + (host.empty() ? "127.0.0.1:" + std::to_string(port) : host) +
                  "\r\n\r\n");
  };
  std::string page;
  for (int i = 0; i < 600 && page.find("200 OK") == page.npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    page = get("GET / HTTP/1.1");
  }
  EXPECT_THAT(page, HasSubstr("http-equiv='refresh'"));
  EXPECT_THAT(get("HEAD / HTTP/1.1"), Not(HasSubstr("<html")));
  EXPECT_THAT(get("GET / HTTP/1.1", "example.org"), HasSubstr("403"));
  EXPECT_THAT(get("GET /x HTTP/1.1"), HasSubstr("404"));
  EXPECT_THAT(get("POST / HTTP/1.1"), HasSubstr("405"));
  EXPECT_THAT(get("nonsense"), HasSubstr("400"));
  EXPECT_THAT(answer_of(port, std::string(20000, 'x')), AnyOf("", HasSubstr("431")));
  write_file(log, "");  // a run begins anew
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_THAT(get("GET / HTTP/1.1"), HasSubstr("200 OK"));
  write_file(log, whole);
  EXPECT_EQ(watched.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  const auto outcome = watched.get();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("http://127.0.0.1:"), HasSubstr("stays as it was")));
  EXPECT_THAT(read_file(folder.out() / "report.html"), Not(HasSubstr("http-equiv='refresh'")));
  EXPECT_THAT(report({folder.out().string(), "--port", "0"}).err, HasSubstr("needs --watch"));
}

TEST(ReportProgram, NamesWhatItCannotUse) {
  const TemporaryFolder folder;
  const auto no_run = report({folder.path().string()});
  EXPECT_EQ(no_run.status, 2);
  EXPECT_THAT(no_run.err, HasSubstr("holds no log.jsonl"));
  const auto log = folder.write("log.jsonl", "");
  const auto empty = report({folder.path().string()});
  EXPECT_EQ(empty.status, 1);
  EXPECT_THAT(empty.err, HasSubstr("is empty"));
  const auto over = report({folder.path().string(), "--out", log});
  EXPECT_EQ(over.status, 2);
  EXPECT_THAT(over.err, HasSubstr("is no report"));
  EXPECT_FALSE(std::filesystem::exists(folder / "report.html"));
  EXPECT_EQ(report({"a", "b", "c"}).status, 2);
}

}  // namespace
}  // namespace zero::test
