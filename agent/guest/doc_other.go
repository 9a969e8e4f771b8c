//go:build !linux

// Package guest holds the steps by which the agent, as the first process of a
// virtual machine, makes it usable. Guests run Linux; elsewhere it is empty.
package guest
