// Package e2e holds the end-to-end tests; see README.md. They run on Linux.
package e2e
