// A team of threads that share numbered tasks.
//
// A phase is over when all its tasks are done, not when all threads have reported: a thread that the system has taken
// off its core holds up nobody, unless it was in the middle of a task. Threads that find nothing to do spin for a
// moment, since the next phase usually follows within microseconds, and then sleep.
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

    int threads() const { return int(workers_.size()) + 1; }

    // Calls task(i) for i from 0 to count - 1, in any order, on any thread; returns when all are done.
    template <class F>
    void run(int count, const F& task) {
        if (count <= 0) return;
        if (count == 1 || workers_.empty()) {
            for (int i = 0; i < count; ++i) task(i);
            return;
        }
        start(count, [](const void* f, int i) { (*static_cast<const F*>(f))(i); }, &task);
    }

private:
    using Call = void (*)(const void*, int);

    void start(int count, Call call, const void* task);
    bool work();
    void loop();

    // Phase (16 bits), tasks in the phase (24), next task (24) in one word: a thread learns in one step which phase a
    // task is of. Call and task stay valid as long as a claimed task is not done, and only then are they read.
    std::atomic<uint64_t> word_{0};
    std::atomic<int> done_{0};
    Call call_ = nullptr;
    const void* task_ = nullptr;
    std::atomic<uint32_t> wake_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> ended_{false};
    int spins_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
