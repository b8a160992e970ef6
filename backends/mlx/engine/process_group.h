// The processes that run the parts of a tensor-parallel model.
//
// Process 0 runs the engine. Before each call of the model, it sends the call to the other processes over TCP, and all
// processes make the call together. The programs themselves contain the sums over the group. If a process ends, all
// other processes end with an error, because they cannot cancel a call that waits for data of the lost process.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "metadata.h"

namespace executorch_mlx::engine {

class ProcessGroup {
 public:
  // Makes a call of the model, and returns whether it succeeded. Must not throw.
  using Call = std::function<bool()>;
  using Message = std::vector<char>;

  // Joins the group to which this process belongs, and connects to the other processes. `path` is the file that this
  // process has loaded, and `part` says which part of the model it is. Throws EngineError in all processes if one of
  // them has a file that does not belong to the group.
  ProcessGroup(const TensorParallel& part, const std::string& path);
  ProcessGroup(const ProcessGroup&) = delete;
  ~ProcessGroup(); // in process 0: ends follow() in the others

  bool is_leader() const {
    return rank_ == 0;
  }

  // In process 0: sends `message`, makes the call, and waits until the others have made it. Returns the result of
  // `call`. If another process has a different result, this process ends.
  bool lead(const Message& message, const Call& call);

  // In the other processes: makes calls until process 0 ends. `call` gets each message.
  void follow(const std::function<bool(std::span<const char>)>& call);

 private:
  void connect(const TensorParallel& part, const std::string& path);
  std::string admit(int listener, const TensorParallel& part, const std::array<char, 16>& key);
  void watch_followers();
  void read_messages();
  void wait_for_results(bool result);
  [[noreturn]] void die(const std::string& reason) const;

  int rank_ = 0;
  int size_ = 1;
  std::vector<int> sockets_; // in process 0: by rank; in the others: only the connection to process 0

  std::mutex mutex_; // guards the members below, except thread_
  std::condition_variable changed_;
  std::vector<std::deque<bool>> results_; // in process 0, by rank: results of calls that lead() has not compared yet
  std::deque<Message> messages_; // in the other processes: messages that follow() has not taken yet
  bool is_closing_ = false;

  std::thread thread_; // watches the connections
};

} // namespace executorch_mlx::engine
