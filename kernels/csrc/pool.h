// A few threads that run the parts of one call. Knows nothing of what a part computes.
//
// Between calls a worker spins for kSpin, since the next kernel of a step usually comes within microseconds, then
// sleeps. OpenMP is avoided on purpose: the process already holds one runtime of it, and two fight for the cores.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hwk {

// A forked child inherits the object but not its workers: it must make its own.
// Invariant: outside run() every worker is idle, and no worker touches a task after run() has returned.
class Pool {
 public:
  using Task = void (*)(void* argument, int part, int parts);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs task(argument, i, threads()) for every i, one of them here; returns when all have ended. One caller at a time.
  void run(Task task, void* argument);

 private:
  static constexpr std::chrono::microseconds kSpin{50};

  void work(int part);
  template <class Ready>
  static bool spin_until(Ready ready);

  const int threads_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> call_{0};
  std::atomic<int> running_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> caller_asleep_{false};
  std::atomic<bool> stop_{false};
  Task task_ = nullptr;
  void* argument_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
};

}  // namespace hwk
