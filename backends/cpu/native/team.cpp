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

Team::Team(int threads, int spins) : ranges_(threads), spins_(spins) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { loop(i); });
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
    ++phase_;
    const int64_t threads = this->threads();
    for (int64_t i = 0; i < threads; ++i)
        ranges_[i].word.store(phase_ << 48 | uint64_t((i + 1) * count / threads) << 24 | uint64_t(i * count / threads));
    // A thread that goes to sleep raises `sleepers_` first and looks at the ranges once more afterwards.
    if (sleepers_.load() > 0) {
        wake_.fetch_add(1);
        wake_all(wake_);
    }
    done_.fetch_add(work(0), std::memory_order_relaxed);
    while (done_.load(std::memory_order_acquire) != count) relax();
}

// Claims the next task of a range and does it; false if there is none.
bool Team::claim(Range& range) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    do {
        if ((word & kNumber) >= (word >> 24 & kNumber)) return false;
    } while (!range.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel));
    call_(task_, int(word & kNumber));
    return true;
}

// Does what there is to do, from the thread's own range first; returns how many tasks.
int Team::work(int thread) {
    int done = 0;
    const int threads = this->threads();
    for (int i = 0; i < threads; ++i)
        while (claim(ranges_[(thread + i) % threads])) ++done;
    return done;
}

bool Team::idle() const {
    for (const Range& range : ranges_) {
        uint64_t word = range.word.load();
        if ((word & kNumber) < (word >> 24 & kNumber)) return false;
    }
    return true;
}

void Team::loop(int thread) {
    int waited = 0;
    while (!ended_.load(std::memory_order_relaxed)) {
        if (int done = work(thread)) {
            done_.fetch_add(done, std::memory_order_release);
            waited = 0;
        } else if (++waited < spins_) {
            relax();
        } else {
            uint32_t seen = wake_.load();
            sleepers_.fetch_add(1);
            if (idle() && !ended_.load()) wait(wake_, seen);
            sleepers_.fetch_sub(1);
            waited = 0;
        }
    }
}

}  // namespace octavo
