"""The port: is it a call or a control request? Only this package sees both planes. Begin with `dispatch`."""
