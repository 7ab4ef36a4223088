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

void Pool::call(Task task, void* argument, bool closes_early) {
  if (threads_ == 1) return task(argument, 0, 1);
  task_ = task;
  argument_ = argument;
  running_.store(threads_ - 1);
  uint64_t number = (door_.load(std::memory_order_relaxed) >> 32) + 1;
  door_.store(number << 32 | static_cast<uint64_t>(threads_ - 1));
  // A worker counts itself asleep before it looks at door_ for the last time, so one of us sees the other.
  if (asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  task(argument, 0, threads_);
  if (closes_early) running_.fetch_sub(static_cast<int>(door_.exchange(number << 32) & 0xFFFFFFFFu));
  auto ended = [this] { return running_.load() == 0; };
  if (spin_until(ended)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_asleep_.store(true);
  done_.wait(lock, ended);
  caller_asleep_.store(false);
}

// Whether the caller of this worker may work on the newest call; it is asked once for each.
bool Pool::enter(uint32_t& seen) {
  uint64_t door = door_.load();
  while (door & 0xFFFFFFFFu && static_cast<uint32_t>(door >> 32) != seen)
    if (door_.compare_exchange_weak(door, door - 1)) {
      seen = static_cast<uint32_t>(door >> 32);
      return true;
    }
  seen = static_cast<uint32_t>(door >> 32);
  return false;
}

void Pool::work(int part) {
  uint32_t seen = 0;
  for (;;) {
    auto called = [&] { return static_cast<uint32_t>(door_.load() >> 32) != seen || stop_.load(); };
    if (!spin_until(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, called);
      asleep_.fetch_sub(1);
    }
    if (stop_.load()) return;
    if (!enter(seen)) continue;
    task_(argument_, part, threads_);
    if (running_.fetch_sub(1) == 1 && caller_asleep_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

bool Team::claim(uint32_t phase, int64_t parts, int64_t grain, int64_t& first, int64_t& last) {
  uint64_t next, state = state_.load(std::memory_order_acquire);
  do {
    if (static_cast<uint32_t>(state >> 32) != phase) return false;
    first = static_cast<int64_t>(state & 0xFFFFFFFFu);
    int64_t left = parts - first;
    if (left == 0) return false;
    int64_t share = left / (2 * threads_) / grain * grain;
    if (share < grain) share = grain;
    last = threads_ == 1 || share > left ? parts : first + share;
    next = state + static_cast<uint64_t>(last - first);
  } while (!state_.compare_exchange_weak(state, next, std::memory_order_acquire));
  return true;
}

void Team::finish(uint32_t phase, int64_t parts, int64_t count) {
  if (finished_.fetch_add(count, std::memory_order_acq_rel) + count < parts) return;
  finished_.store(0, std::memory_order_relaxed);
  state_.store(static_cast<uint64_t>(phase + 1) << 32);
  // A sleeper counts itself before it looks at state_ for the last time, so one of us sees the other.
  if (asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
}

void Team::wait(uint32_t phase) {
  auto passed = [&] { return static_cast<uint32_t>(state_.load() >> 32) != phase; };
  if (passed() || spin_until(passed)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_.fetch_add(1);
  wake_.wait(lock, passed);
  asleep_.fetch_sub(1);
}

}  // namespace hwk
