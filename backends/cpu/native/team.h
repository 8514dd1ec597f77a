// A team of threads that share numbered tasks.
//
// Each thread has a range of the tasks for a start, and takes from the others' when it is through: as long as all go
// on, none touches what another writes, which costs as much as a small task. A phase is over when all its tasks are done,
// not when all threads have reported: a thread that the system has taken off its core holds up nobody, unless it was
// in the middle of a task. Threads that find nothing to do spin for a moment, since the next phase usually follows
// within microseconds, and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

class Team {
public:
    // threads: in all, the caller's included. spins: looks for work before a thread sleeps.
    Team(int threads, int spins);
    ~Team();
    Team(const Team&) = delete;

    int threads() const { return int(ranges_.size()); }

    // Calls task(i) for i from 0 to count - 1, in any order, on any thread; returns when all are done.
    template <class F>
    void run(int count, const F& task) {
        if (count <= 0) return;
        if (count == 1 || threads() == 1) {
            for (int i = 0; i < count; ++i) task(i);
            return;
        }
        start(count, [](const void* f, int i) { (*static_cast<const F*>(f))(i); }, &task);
    }

private:
    using Call = void (*)(const void*, int);

    // What is left of a thread's range: phase (16 bits), end (24), next task (24) in one word, so that a thread learns
    // in one step which phase a task is of. In a line of the cache of its own.
    struct alignas(64) Range {
        std::atomic<uint64_t> word{0};
    };

    void start(int count, Call call, const void* task);
    bool claim(Range& range);
    int work(int thread);
    bool idle() const;
    void loop(int thread);

    std::vector<Range> ranges_;
    // Valid as long as a claimed task is not done, and only then are they read.
    Call call_ = nullptr;
    const void* task_ = nullptr;
    uint64_t phase_ = 0;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<uint32_t> wake_{0};
    std::atomic<bool> ended_{false};
    int spins_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
