// A few threads that run the parts of one call, and what they need to walk through a long one together. Knows nothing
// of what a part computes.
//
// A waiting thread spins for kSpin, since what it waits for usually comes within microseconds, then sleeps: threads of
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
// Invariant: outside run() and invite() no worker is in a task, and none touches one after they have returned.
class Pool {
 public:
  using Task = void (*)(void* argument, int part, int parts);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs task(argument, i, threads()) for every i, one of them here; returns when all have ended. One caller at a time.
  void run(Task task, void* argument) { call(task, argument, false); }

  // The same, but workers that have not begun when the caller's own part has ended stay out. For a task that leaves
  // nothing undone when any of its parts returns: see Team.
  void invite(Task task, void* argument) { call(task, argument, true); }

 private:
  void call(Task task, void* argument, bool closes_early);
  void work(int part);
  bool enter(uint32_t& seen);

  const int threads_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> door_{0};  // number of the call << 32 | workers that may still enter it
  std::atomic<int> running_{0};    // workers the caller has to wait for
  std::atomic<int> asleep_{0};
  std::atomic<bool> caller_asleep_{false};
  std::atomic<bool> stop_{false};
  Task task_ = nullptr;
  void* argument_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
};

// Threads on a walk through the same phases, each of which has parts to share out. A phase ends when its parts
// are done, not when every thread has reached it: a thread that lost its core for a while skips the phases that the
// others have finished.
// Invariant: a phase begins when every part of the one before is done; a thread touches what it computes inside of the
// parts it took alone.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // The phase that begins next. Every thread of a walk counts on from the number its caller has read here.
  uint32_t phase() const { return static_cast<uint32_t>(state_.load() >> 32); }

  // Calls compute(first, last) on pieces of `parts` > 0 parts until all are taken, then waits until all are done.
  // Pieces are multiples of `grain` where possible and shrink towards the end.
  template <class Compute>
  void share(uint32_t phase, int64_t parts, int64_t grain, Compute compute) {
    int64_t first, last;
    while (claim(phase, parts, grain, first, last)) {
      compute(first, last);
      finish(phase, parts, last - first);
    }
    wait(phase);
  }

 private:
  bool claim(uint32_t phase, int64_t parts, int64_t grain, int64_t& first, int64_t& last);
  void finish(uint32_t phase, int64_t parts, int64_t count);
  void wait(uint32_t phase);

  const int threads_;
  alignas(kCacheLine) std::atomic<uint64_t> state_{0};  // phase << 32 | its parts that are taken
  alignas(kCacheLine) std::atomic<int64_t> finished_{0};
  alignas(kCacheLine) std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hwk
