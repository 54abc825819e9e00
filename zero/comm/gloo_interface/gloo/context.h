// The part of Gloo that c10d's ProcessGroupGloo.hpp needs: LibTorch does not bring its headers
// along.
//
// Note [Gloo without its headers]
// That header holds Gloo's objects only by pointers, so their layouts do not matter here. libzero
// names these types, but makes no object of them and calls none of their members. The store's
// interface is needed because a class of that header derives from it inline; libzero makes no such
// object, so its table of virtual functions is LibTorch's own. cmake/Gloo.cmake tries all of it
// with the LibTorch at hand.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport

namespace rendezvous {

class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace rendezvous
}  // namespace gloo
