// A few threads that run the parts of one call, and what they need to walk through a long one together. Knows nothing
// of what a part computes.
//
// Whoever waits spins for kSpin, since what it waits for usually comes within microseconds, then sleeps: threads of
// another process may need this core to get on. OpenMP is avoided on purpose: the process already holds one runtime of
// it, and two fight for the cores.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hwk {

constexpr std::chrono::microseconds kSpin{50};
constexpr size_t kCacheLine = 64;

// Whether ready() came true while spinning.
template <class Ready>
bool spin_until(Ready ready) {
  auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

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
  void work(int part);

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

// Half-open range of parts.
struct Span {
  int64_t first, last;
};

// The threads of one run() on a walk of many phases. Between two meetings they share out the parts of one phase.
// Invariant: nobody passes a meeting before everybody has come to it, and then nothing is claimed.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  void meet();

  // Takes some of the parts nobody has taken since the last meeting, `grain` or more of them while there are; false
  // when all are taken. Pieces shrink towards the end, so that a thread that lost its core for a while is not waited
  // for long.
  bool claim(int64_t parts, int64_t grain, Span& piece);

 private:
  const int threads_;
  alignas(kCacheLine) std::atomic<int> arrived_{0};
  alignas(kCacheLine) std::atomic<uint32_t> round_{0};
  std::atomic<int> asleep_{0};
  alignas(kCacheLine) std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hwk
