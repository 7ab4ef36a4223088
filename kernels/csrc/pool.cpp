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

void Team::meet() {
  if (threads_ == 1) return next_.store(0, std::memory_order_relaxed);
  uint32_t round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    round_.store(round + 1);
    // A sleeper counts itself before it looks at round_ for the last time, so one of us sees the other.
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return;
  }
  auto passed = [&] { return round_.load() != round; };
  if (spin_until(passed)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_.fetch_add(1);
  wake_.wait(lock, passed);
  asleep_.fetch_sub(1);
}

bool Team::claim(int64_t parts, int64_t grain, Span& piece) {
  int64_t first = next_.load(std::memory_order_relaxed), last;
  do {
    int64_t left = parts - first;
    if (left <= 0) return false;
    int64_t share = left / (2 * threads_) / grain * grain;
    if (share < grain) share = grain;
    last = threads_ == 1 || share > left ? parts : first + share;
  } while (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
  piece = {first, last};
  return true;
}

}  // namespace hwk
