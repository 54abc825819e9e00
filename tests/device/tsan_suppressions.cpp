// ThreadSanitizer does not report these in tests on the simulated device, beside tests/tsan.supp.
//
// LibTorch's autograd has a thread for a device. That thread and the one that called `backward`
// share two objects of LibTorch's: the pass (GraphTask), and the caller's queue of work
// (ReadyQueue). They hold them by shared pointers, whose counts are not instrumented. Whoever lets
// go last destroys the objects with their mutexes, after the last use by both; ThreadSanitizer sees
// no order there. Where no frame names the queue its condition variable is what is destroyed. That
// line is for every condition variable, and so it is here alone and not in tests/tsan.supp.

// The name is ThreadSanitizer's.
extern "C" const char* __tsan_default_suppressions();  // NOLINT(bugprone-reserved-identifier)

extern "C" const char* __tsan_default_suppressions() {  // NOLINT(bugprone-reserved-identifier)
  return "race:std::_Sp_counted_ptr_inplace<torch::autograd::GraphTask\n"
         "race:torch::autograd::ReadyQueue\n"
         "race_top:pthread_cond_destroy\n";
}
