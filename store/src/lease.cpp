#include "lease.h"

#include <structmember.h>

#include <cstddef>
#include <utility>

namespace k3::store {

namespace {

struct Lease {
    PyObject_HEAD PyObject* layer;
    PyObject* expert;
    PyObject* payload;     // null once released
    PyObject* on_release;  // may be null, as `given`
    PyObject* given;       // a tuple
};

struct ReadyLeases {
    PyObject_HEAD PyObject* ready;  // a deque
};

// The two types live as long as the interpreter.
PyTypeObject* lease_type = nullptr;
PyObject* popleft_name = nullptr;
PyObject* await_next_name = nullptr;

Lease* as_lease(PyObject* object) { return reinterpret_cast<Lease*>(object); }
ReadyLeases* as_ready(PyObject* object) { return reinterpret_cast<ReadyLeases*>(object); }

// Lease

// Takes over its own references to all of these.
PyObject* new_lease(PyTypeObject* type, PyObject* layer, PyObject* expert, PyObject* payload, PyObject* on_release,
                    PyObject* given) {
    PyObject* const object = type->tp_alloc(type, 0);
    if (object == nullptr) {
        for (PyObject* taken : {layer, expert, payload, on_release, given}) Py_XDECREF(taken);
        return nullptr;
    }
    Lease* const lease = as_lease(object);
    lease->layer = layer, lease->expert = expert, lease->payload = payload;
    lease->on_release = on_release, lease->given = given;
    return object;
}

PyObject* lease_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Lease() takes no keyword arguments");
        return nullptr;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count < 3 || count > 4) {
        PyErr_SetString(PyExc_TypeError, "Lease() takes layer, expert, payload and perhaps on_release");
        return nullptr;
    }
    PyObject* const on_release = count == 4 ? PyTuple_GET_ITEM(args, 3) : Py_None;
    return new_lease(type, Py_NewRef(PyTuple_GET_ITEM(args, 0)), Py_NewRef(PyTuple_GET_ITEM(args, 1)),
                     Py_NewRef(PyTuple_GET_ITEM(args, 2)), on_release == Py_None ? nullptr : Py_NewRef(on_release),
                     nullptr);
}

int lease_traverse(PyObject* self, visitproc visit, void* arg) {
    Lease* const lease = as_lease(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(lease->layer);
    Py_VISIT(lease->expert);
    Py_VISIT(lease->payload);
    Py_VISIT(lease->on_release);
    Py_VISIT(lease->given);
    return 0;
}

int lease_clear(PyObject* self) {
    Lease* const lease = as_lease(self);
    Py_CLEAR(lease->payload);
    Py_CLEAR(lease->on_release);
    Py_CLEAR(lease->given);
    return 0;
}

void lease_dealloc(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    lease_clear(self);
    Py_XDECREF(as_lease(self)->layer);
    Py_XDECREF(as_lease(self)->expert);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* lease_payload(PyObject* self, void*) {
    Lease* const lease = as_lease(self);
    if (lease->payload != nullptr) return Py_NewRef(lease->payload);
    return PyErr_Format(PyExc_ValueError, "lease of layer %S, expert %S was released", lease->layer,
                        lease->expert);
}

PyObject* lease_release(PyObject* self, PyObject*) {
    Lease* const lease = as_lease(self);
    // All three are taken before anything else can run: another thread's release finds nothing to do.
    PyObject* const payload = std::exchange(lease->payload, nullptr);
    PyObject* const on_release = std::exchange(lease->on_release, nullptr);
    PyObject* const given = std::exchange(lease->given, nullptr);
    PyObject* result = Py_None;
    if (on_release == nullptr) {
        Py_INCREF(result);
    } else {
        PyObject* const answer =
            given == nullptr ? PyObject_CallNoArgs(on_release) : PyObject_Call(on_release, given, nullptr);
        result = answer == nullptr ? nullptr : Py_NewRef(Py_None);
        Py_XDECREF(answer);
    }
    Py_XDECREF(payload);
    Py_XDECREF(on_release);
    Py_XDECREF(given);
    return result;
}

PyObject* lease_withdraw(PyObject* self, PyObject*) {
    Lease* const lease = as_lease(self);
    PyObject* const given = std::exchange(lease->given, nullptr);
    Py_CLEAR(lease->payload);
    Py_CLEAR(lease->on_release);
    return given != nullptr ? given : PyTuple_New(0);
}

PyObject* lease_enter(PyObject* self, PyObject*) { return Py_NewRef(self); }

PyObject* lease_exit(PyObject* self, PyObject* const*, Py_ssize_t) { return lease_release(self, nullptr); }

PyMemberDef lease_members[] = {
    {"layer", T_OBJECT_EX, offsetof(Lease, layer), READONLY, nullptr},
    {"expert", T_OBJECT_EX, offsetof(Lease, expert), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef lease_getset[] = {
    {"payload", lease_payload, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef lease_methods[] = {
    {"release", lease_release, METH_NOARGS, nullptr},
    {"withdraw", lease_withdraw, METH_NOARGS, nullptr},
    {"__enter__", lease_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lease_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot lease_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("One expert in RAM, on loan. A context manager: leaving it releases. Sources make them.")},
    {Py_tp_new, reinterpret_cast<void*>(lease_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(lease_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(lease_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(lease_clear)},
    {Py_tp_members, lease_members},
    {Py_tp_getset, lease_getset},
    {Py_tp_methods, lease_methods},
    {0, nullptr},
};

PyType_Spec lease_spec = {"k3.store._store.Lease", sizeof(Lease), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          lease_slots};

// ReadyLeases

int ready_init(PyObject* self, PyObject* args, PyObject* kwargs) {
    PyObject* ready;
    if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "ReadyLeases() takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O", &ready)) return -1;
    Py_XSETREF(as_ready(self)->ready, Py_NewRef(ready));
    return 0;
}

int ready_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_ready(self)->ready);
    return 0;
}

int ready_clear(PyObject* self) {
    Py_CLEAR(as_ready(self)->ready);
    return 0;
}

void ready_dealloc(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    ready_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* ready_next(PyObject* self) {
    PyObject* const ready = as_ready(self)->ready;
    const Py_ssize_t count = ready == nullptr ? 0 : PyObject_Size(ready);
    if (count < 0) return nullptr;
    return count > 0 ? PyObject_CallMethodNoArgs(ready, popleft_name)
                     : PyObject_CallMethodNoArgs(self, await_next_name);
}

PyType_Slot ready_slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(ready_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(ready_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(ready_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(ready_clear)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(ready_next)},
    {0, nullptr},
};

PyType_Spec ready_spec = {"k3.store._store.ReadyLeases", sizeof(ReadyLeases), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, ready_slots};

nb::object checked(PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
}

nb::object view_of(const Completion& completion, const LendTo& to) {
    const nb::object offset = checked(PyLong_FromUnsignedLongLong(completion.offset));
    const nb::object bytes = checked(PyLong_FromUnsignedLongLong(completion.payload_bytes));
    const nb::object key = checked(PyTuple_Pack(2, offset.ptr(), bytes.ptr()));
    PyObject* const known = PyDict_GetItemWithError(to.views.ptr(), key.ptr());
    if (known != nullptr) return nb::borrow(known);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return to.view(offset, bytes);
}

}  // namespace

nb::list make_leases(const std::vector<Completion>& granted, const LendTo& to) {
    nb::list leases;
    for (const Completion& completion : granted) {
        const nb::object layer = checked(PyLong_FromUnsignedLong(completion.layer));
        const nb::object expert = checked(PyLong_FromUnsignedLong(completion.expert));
        const int is_awaited = PySet_Contains(to.awaited.ptr(), expert.ptr());
        if (is_awaited < 0) throw nb::python_error();
        if (is_awaited == 0) {
            PyErr_Format(PyExc_AssertionError, "the daemon granted layer %S, expert %S, which nobody asked for",
                         layer.ptr(), expert.ptr());
            throw nb::python_error();
        }
        nb::object payload = view_of(completion, to);
        const nb::object slot = checked(PyLong_FromUnsignedLong(completion.slot));
        const nb::object generation = checked(PyLong_FromUnsignedLong(completion.generation));
        nb::object given =
            checked(PyTuple_Pack(4, to.request.ptr(), to.session.ptr(), slot.ptr(), generation.ptr()));
        leases.append(checked(new_lease(lease_type, nb::object(layer).release().ptr(),
                                        nb::object(expert).release().ptr(), payload.release().ptr(),
                                        nb::object(to.on_release).release().ptr(), given.release().ptr())));
    }
    // Only now that all of them are made: what failed before this is still awaited.
    for (nb::handle lease : leases) {
        PyObject* const expert = as_lease(lease.ptr())->expert;
        const int was_awaited = PySet_Discard(to.awaited.ptr(), expert);
        if (was_awaited == 0) PyErr_Format(PyExc_AssertionError, "the daemon granted expert %S twice", expert);
        if (was_awaited <= 0) throw nb::python_error();
    }
    return leases;
}

void bind_leases(nb::module_& m) {
    const nb::object lease = checked(PyType_FromSpec(&lease_spec));
    const nb::object ready = checked(PyType_FromSpec(&ready_spec));
    lease_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(lease.ptr()));
    popleft_name = checked(PyUnicode_InternFromString("popleft")).release().ptr();
    await_next_name = checked(PyUnicode_InternFromString("_await_next")).release().ptr();
    m.attr("Lease") = lease;
    m.attr("ReadyLeases") = ready;
}

}  // namespace k3::store
