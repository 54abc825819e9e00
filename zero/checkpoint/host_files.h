// Files that hosts keep for one another.
//
// Note [Files for other hosts]
// Each rank listens at its host's address for ranks of other hosts, which send it files to keep in
// a folder, or ask for files that lie there. Each file goes over a connection of its own, read and
// written by a thread of the receiving rank that does nothing else. So files move beside the
// collectives of training: neither waits for the other, whatever the order in which ranks come to
// either. A request begins with a token that rank 0 draws when the ranks meet; whoever does not
// have it gets no answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/group.h"

namespace zero {

class HostFiles {
 public:
  /// Meets the other ranks, and serves them `folder` of this host, below which alone files are
  /// written and read. Collective. Throws CommError if this rank cannot listen.
  HostFiles(comm::Group& group, std::filesystem::path folder);
  /// Ends the transfers of other ranks that are under way.
  ~HostFiles();
  HostFiles(const HostFiles&) = delete;
  HostFiles& operator=(const HostFiles&) = delete;

  /// Sends a file to the host of `rank`, where it becomes the file `name`, as "folder/file", whole
  /// or not at all. Returns when it is there. Throws CheckpointError with the reason. Thread-safe.
  void send(int rank, const std::filesystem::path& file, const std::string& name) const;
  /// Fetches the file `name` from the host of `rank` to `to`. Throws as `send` does. Thread-safe.
  void fetch(int rank, const std::string& name, const std::filesystem::path& to) const;

 private:
  class Server;
  struct Place {
    std::string address;
    uint16_t port = 0;
  };

  std::string token_;
  std::unique_ptr<Server> server_;
  std::vector<Place> places_;  // by rank
};

}  // namespace zero
