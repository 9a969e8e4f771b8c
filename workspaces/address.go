package workspaces

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"go.etcd.io/bbolt"
)

// pool hands out the addresses of one range. Addresses that were never used come
// first, in order; then those given back, the longest unused first. So a stale
// answer in somebody's cache leads to nobody for as long as can be.
//
// It keeps its place in two keys of the bucket "addresses" and its queue in the
// bucket named after it, all changed within the caller's transaction.
type pool struct {
	name    string // also the bucket of addresses given back: sequence -> address
	network netip.Prefix
}

var addressesBucket = []byte("addresses")

// take returns a free address. used tells which are taken for other reasons than
// the pool's own: reserved, or owned by a record from before a change of range.
func (p pool) take(tx *bbolt.Tx, used func(netip.Addr) bool) (netip.Addr, error) {
	next, err := p.next(tx)
	if err != nil {
		return netip.Addr{}, err
	}
	for ; p.network.Contains(next) && next.IsValid(); next = next.Next() {
		if !p.usable(next) || used(next) {
			continue
		}
		return next, p.setNext(tx, next.Next())
	}
	if err := p.setNext(tx, next); err != nil {
		return netip.Addr{}, err
	}
	queue := tx.Bucket([]byte(p.name))
	for key, value := queue.Cursor().First(); key != nil; key, value = queue.Cursor().First() {
		addr, ok := netip.AddrFromSlice(value)
		if err := queue.Delete(key); err != nil {
			return netip.Addr{}, fmt.Errorf("take an address back: %w", err)
		}
		if ok && p.network.Contains(addr) && !used(addr) {
			return addr, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s range %s: %w", p.name, p.network, ErrNoAddress)
}

// give puts addr at the end of the queue.
func (p pool) give(tx *bbolt.Tx, addr netip.Addr) error {
	queue := tx.Bucket([]byte(p.name))
	seq, err := queue.NextSequence()
	if err != nil {
		return fmt.Errorf("give %s back: %w", addr, err)
	}
	if err := queue.Put(key64(seq), addr.AsSlice()); err != nil {
		return fmt.Errorf("give %s back: %w", addr, err)
	}
	return nil
}

// usable leaves out the gateway's own address and those that some programs take
// for a network's or a broadcast address.
func (p pool) usable(addr netip.Addr) bool {
	last := addr.As4()[3]
	return addr != p.network.Addr() && addr != p.first() && last != 0 && last != 255
}

// first is the first host of the range.
func (p pool) first() netip.Addr { return p.network.Addr().Next() }

// next is the first address that was never handed out. A range other than the
// one of the last run starts from its beginning.
func (p pool) next(tx *bbolt.Tx) (netip.Addr, error) {
	b := tx.Bucket(addressesBucket)
	if string(b.Get([]byte(p.name+" range"))) != p.network.String() {
		if err := b.Put([]byte(p.name+" range"), []byte(p.network.String())); err != nil {
			return netip.Addr{}, fmt.Errorf("note range %s: %w", p.network, err)
		}
		return p.network.Addr(), nil
	}
	addr, ok := netip.AddrFromSlice(b.Get([]byte(p.name + " next")))
	if !ok {
		return p.network.Addr(), nil
	}
	return addr, nil
}

func (p pool) setNext(tx *bbolt.Tx, addr netip.Addr) error {
	if err := tx.Bucket(addressesBucket).Put([]byte(p.name+" next"), addr.AsSlice()); err != nil {
		return fmt.Errorf("note next address %s: %w", addr, err)
	}
	return nil
}

func key64(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
