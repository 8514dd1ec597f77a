#include "team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <chrono>
#endif

namespace octavo {
namespace {

constexpr uint64_t kNumber = (1u << 24) - 1;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while the value is as expected.
void wait(std::atomic<uint32_t>& value, uint32_t expected) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
#else
    if (value.load() == expected) std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

Team::Team(int threads, int spins) : spins_(spins) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { loop(); });
}

Team::~Team() {
    ended_.store(true);
    wake_.fetch_add(1);
    wake_all(wake_);
    for (auto& worker : workers_) worker.join();
}

void Team::start(int count, Call call, const void* task) {
    call_ = call;
    task_ = task;
    done_.store(0, std::memory_order_relaxed);
    uint64_t phase = (word_.load(std::memory_order_relaxed) >> 48) + 1;
    word_.store(phase << 48 | uint64_t(count) << 24);
    // A thread that goes to sleep raises `sleepers_` first and looks at the word once more afterwards.
    if (sleepers_.load() > 0) {
        wake_.fetch_add(1);
        wake_all(wake_);
    }
    while (work()) {
    }
    while (done_.load(std::memory_order_acquire) != count) relax();
}

// Claims a task and does it; false if there is none.
bool Team::work() {
    uint64_t word = word_.load(std::memory_order_acquire);
    do {
        if ((word & kNumber) >= (word >> 24 & kNumber)) return false;
    } while (!word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel));
    call_(task_, int(word & kNumber));
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Team::loop() {
    int idle = 0;
    while (!ended_.load(std::memory_order_relaxed)) {
        if (work()) {
            idle = 0;
        } else if (++idle < spins_) {
            relax();
        } else {
            uint32_t seen = wake_.load();
            sleepers_.fetch_add(1);
            uint64_t word = word_.load();
            if ((word & kNumber) >= (word >> 24 & kNumber) && !ended_.load()) wait(wake_, seen);
            sleepers_.fetch_sub(1);
            idle = 0;
        }
    }
}

}  // namespace octavo
