// The module: threads, variants, and the groups of functions bound in bind_*.cpp.
#include "bind.h"

#include "cpu.h"
#include "threads.h"
#include "variant.h"

namespace k3 {
namespace {

nb::tuple names() {
    nb::list list;
    for (int i = 0; i < variant_count(); ++i) list.append(variant_name(i));
    return nb::tuple(list);
}

void choose_variant(const std::string& name) {
    if (!set_variant(name.c_str())) throw nb::value_error(("this CPU or build has no variant " + name).c_str());
}

void choose_threads(int n) {
    if (n < 1 || n > kThreadsMax) throw nb::value_error("threads must be from 1 to 1024");
    unlocked([&] { set_threads(n); });
}

}  // namespace
}  // namespace k3

NB_MODULE(_kernels, m) {
    using namespace k3;
    m.def("cpu_variant", [] { return std::string(kernels().name); });
    m.def("cpu_variants", &names);
    m.def("set_variant", &choose_variant, nb::arg("name"));
    m.def("get_threads", &get_threads);
    m.def("set_threads", &choose_threads, nb::arg("n"));
    m.def("usable_cpus", &usable_cpus);
    m.def("quota_cpus", &quota_cpus, nb::arg("cgroup_file"), nb::arg("root"));
    bind_matrices(m);
    bind_rowops(m);
    bind_layers(m);
    bind_sha256(m);
}
