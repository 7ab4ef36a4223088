// See pool.h.
#include "pool.h"

namespace hwk {

Pool::Pool(int threads) : threads_(threads) {
  for (int part = 1; part < threads; ++part) workers_.emplace_back([this, part] { work(part); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

template <class Ready>
bool Pool::spin_until(Ready ready) {
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

void Pool::run(Task task, void* argument) {
  if (threads_ == 1) return task(argument, 0, 1);
  task_ = task;
  argument_ = argument;
  running_.store(threads_ - 1);
  call_.fetch_add(1);
  // A worker counts itself asleep before it looks at call_ for the last time, so one of us sees the other.
  if (asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  task(argument, 0, threads_);
  auto ended = [this] { return running_.load() == 0; };
  if (spin_until(ended)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_asleep_.store(true);
  done_.wait(lock, ended);
  caller_asleep_.store(false);
}

void Pool::work(int part) {
  uint64_t seen = 0;
  for (;;) {
    auto called = [&] { return call_.load() != seen || stop_.load(); };
    if (!spin_until(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, called);
      asleep_.fetch_sub(1);
    }
    if (stop_.load()) return;
    seen = call_.load();
    task_(argument_, part, threads_);
    if (running_.fetch_sub(1) == 1 && caller_asleep_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

}  // namespace hwk
