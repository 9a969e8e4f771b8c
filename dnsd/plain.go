package dnsd

import (
	"bytes"
	"encoding/binary"

	"github.com/miekg/dns"
)

// optSize is the length of an OPT record without options (RFC 6891 section 6.1.2).
const optSize = 11

// plainQuestion is a question as resolvers really ask it.
type plainQuestion struct {
	end    int  // offset behind the question
	edns   bool // an OPT of version 0 without options follows
	do     bool
	qtype  uint16
	zoneAt int // offset of the zone in the message
	host   string
}

// answerPlain answers the questions that make up nearly all of the traffic,
// without the library: an ordinary type, asked for a name below one of our zones
// that is written in the characters of host names, with no EDNS options. It says
// the same as the long way does (FuzzAnswer compares them), in a tenth of the
// time. It reports false for all others.
func (s *Server) answerPlain(dst, msg []byte) ([]byte, bool) {
	q, ok := s.parsePlain(msg)
	if !ok {
		return dst, false
	}
	found, exists := s.lookup(q.host)
	start := len(dst)
	dst = append(dst, msg[:q.end]...)
	head := dst[start:]
	head[2] = 0x84 | msg[2]&0x01 // an answer, with authority, RD as it came
	head[3] = msg[3] & 0x10      // CD as it came
	if !exists {
		head[3] |= dns.RcodeNameError
	}
	copy(head[6:headerSize], []byte{0, 0, 0, 0, 0, 0})
	switch {
	case exists && q.qtype == dns.TypeA && found.A.Is4():
		a := found.A.As4()
		head[7] = 1
		dst = appendRecord(dst, headerSize, dns.TypeA, a[:])
	case exists && q.qtype == dns.TypeAAAA && found.AAAA.Is6():
		a := found.AAAA.As16()
		head[7] = 1
		dst = appendRecord(dst, headerSize, dns.TypeAAAA, a[:])
	default:
		head[9] = 1
		dst = appendSOA(dst, q.zoneAt)
	}
	if q.edns {
		dst[start+11] = 1
		dst = append(dst, 0, 0, byte(dns.TypeOPT), maxUDPSize>>8, maxUDPSize&0xff, 0, 0, 0, 0, 0, 0)
		if q.do {
			dst[len(dst)-4] = 0x80
		}
	}
	return dst, true
}

// parsePlain reads msg, which has a whole header and is no answer.
func (s *Server) parsePlain(msg []byte) (q plainQuestion, ok bool) {
	// Opcode QUERY, not truncated, one question, nothing else but perhaps one OPT.
	if msg[2]&0x7a != 0 || !bytes.Equal(msg[4:11], []byte{0, 1, 0, 0, 0, 0, 0}) || msg[11] > 1 {
		return q, false
	}
	var lower [255]byte // the name in lower case, length bytes included
	last, zoneStart := -1, -1
	at := headerSize
	for {
		if at >= len(msg) {
			return q, false
		}
		n := int(msg[at])
		start := at - headerSize
		if n > 63 || start+n+1 > len(lower) || at+n+1 > len(msg) {
			return q, false
		}
		lower[start] = byte(n)
		if n == 0 {
			break
		}
		for i, c := range msg[at+1 : at+1+n] {
			if c >= 'A' && c <= 'Z' {
				c += 'a' - 'A'
			}
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return q, false
			}
			lower[start+1+i] = c
		}
		at += n + 1
	}
	nameEnd := at + 1 - headerSize
	q.end = at + 5
	if len(msg) < q.end {
		return q, false
	}
	// The zone begins at a label's start; the label before it is the host.
	for i := 0; i < nameEnd-1 && zoneStart < 0; i += int(lower[i]) + 1 {
		if s.isZone(lower[i:nameEnd]) {
			zoneStart = i
			break
		}
		last = i
	}
	if zoneStart < 0 || last < 0 {
		return q, false
	}
	q.zoneAt = headerSize + zoneStart
	q.qtype = binary.BigEndian.Uint16(msg[at+1:])
	if q.qtype == 0 || q.qtype >= 128 || q.qtype == dns.TypeOPT || binary.BigEndian.Uint16(msg[at+3:]) != dns.ClassINET {
		return q, false
	}
	if !q.parseOPT(msg) {
		return q, false
	}
	q.host = string(lower[last+1 : zoneStart])
	return q, true
}

// parseOPT reads what follows the question.
func (q *plainQuestion) parseOPT(msg []byte) bool {
	rest := msg[q.end:]
	if msg[11] == 0 {
		return len(rest) == 0
	}
	if len(rest) != optSize || rest[0] != 0 || rest[1] != 0 || rest[2] != byte(dns.TypeOPT) ||
		rest[5] != 0 || rest[6] != 0 || rest[9] != 0 || rest[10] != 0 {
		return false
	}
	q.edns, q.do = true, rest[7]&0x80 != 0
	return true
}

func (s *Server) isZone(wire []byte) bool {
	for i := range s.zones {
		if bytes.Equal(s.zones[i].wire, wire) {
			return true
		}
	}
	return false
}

// appendRecord appends a record of class IN whose owner is the name at offset
// name of the message.
func appendRecord(dst []byte, name int, rrtype uint16, data []byte) []byte {
	dst = binary.BigEndian.AppendUint16(dst, 0xc000|uint16(name))
	dst = binary.BigEndian.AppendUint16(dst, rrtype)
	dst = binary.BigEndian.AppendUint16(dst, dns.ClassINET)
	dst = binary.BigEndian.AppendUint32(dst, ttl)
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(data)))
	return append(dst, data...)
}

// appendSOA appends what Server.soa makes, for the zone at offset zone.
func appendSOA(dst []byte, zone int) []byte {
	var data [64]byte
	d := append(data[:0], "\x02gw"...)
	d = binary.BigEndian.AppendUint16(d, 0xc000|uint16(zone))
	d = append(d, "\x0ahostmaster"...)
	d = binary.BigEndian.AppendUint16(d, 0xc000|uint16(zone))
	for _, n := range [...]uint32{1, 3600, 600, 86400, ttl} {
		d = binary.BigEndian.AppendUint32(d, n)
	}
	return appendRecord(dst, zone, dns.TypeSOA, d)
}
